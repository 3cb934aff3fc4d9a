//! [`Binding`]: a published version of a name, as a file of the directory holds it.
//!
//! The rule it keeps: a file is decoded only if its checksums are right, and the owner can be read
//! off the file's name in any case. [`FORMAT`] changes with every change of these formats.
//!
//! A file begins with [`MAGIC`]. Then come two parts, owner and name and the rest: each is its
//! length in 8 bytes, its bytes (postcard), and the XXH3-128 of all of the file up to there.

use farpage_fabric::host::Origin;
use farpage_wire::{ExtentId, PublicKey, ServerId, register::Register};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

/// Number of the directory's format.
pub(super) const FORMAT: u32 = 2;
/// Number of the format before, which is read, too: bindings have no identity and no register.
pub(super) const FORMAT_BEFORE: u32 = 1;

/// File that names the directory's format.
pub(super) const FORMAT_FILE: &str = "format";

/// Beginning of the names of files that are not whole yet.
pub(super) const UNFINISHED: &str = "new-";

const MAGIC: &[u8; 16] = b"farpage bound 2\n";
const MAGIC_BEFORE: &[u8; 16] = b"farpage binding\n";
const HASH_BYTES: usize = 16;

/// A published version of a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Binding {
    /// Identity of the server, which is the same in all files of a directory. `None` in files of
    /// [`FORMAT_BEFORE`].
    pub(crate) server: Option<ServerId>,
    /// Number of the version.
    pub(crate) version: u64,
    /// Origin that is charged.
    pub(crate) origin: Origin,
    pub(crate) manifest: Vec<u8>,
    pub(crate) extents: Vec<BoundExtent>,
    /// Promise to writers, and the version's ballot.
    pub(crate) register: Register,
}

/// A binding as files of [`FORMAT_BEFORE`] hold it.
#[derive(Deserialize)]
#[cfg_attr(test, derive(Serialize))]
struct BindingBefore {
    version: u64,
    origin: Origin,
    manifest: Vec<u8>,
    extents: Vec<BoundExtent>,
}

impl From<BindingBefore> for Binding {
    fn from(before: BindingBefore) -> Self {
        Self {
            server: None,
            version: before.version,
            origin: before.origin,
            manifest: before.manifest,
            extents: before.extents,
            register: Register::default(),
        }
    }
}

/// An extent of a published version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BoundExtent {
    pub(crate) id: ExtentId,
    pub(crate) bytes: u64,
    pub(crate) atomics: bool,
}

/// Returns the text of the format file of `format`.
pub(super) fn format_text(format: u32) -> String {
    format!("farpage names, format {format}\n")
}

/// Returns the file of an extent's bytes.
pub(super) fn extent_file(id: ExtentId) -> String {
    format!("extent-{:016x}", id.0)
}

/// Returns the extent that `file` is of.
pub(super) fn extent_of(file: &str) -> Option<ExtentId> {
    let id = u64::from_str_radix(file.strip_prefix("extent-")?, 16).ok()?;
    let id = ExtentId(id);
    (extent_file(id) == file).then_some(id)
}

/// Returns the file of a name's binding. A name may be longer than a file's name, so its hash is
/// there.
pub(crate) fn name_file(owner: PublicKey, name: &str) -> String {
    let hash = XxHash3_128::oneshot(name.as_bytes());
    format!("name-{owner}-{hash:032x}")
}

/// Returns the owner of the name that `file` is of.
pub(super) fn owner_of(file: &str) -> Option<PublicKey> {
    let (owner, hash) = file.strip_prefix("name-")?.split_once('-')?;
    let is_hash = hash.len() == 32 && hash.bytes().all(|it| it.is_ascii_hexdigit());
    owner.parse().ok().filter(|_| is_hash)
}

/// Returns the bytes of a name's file.
pub(super) fn encode(owner: PublicKey, name: &str, binding: &Binding) -> Vec<u8> {
    encode_as(MAGIC, owner, name, binding)
}

fn encode_as(magic: &[u8], owner: PublicKey, name: &str, binding: &impl Serialize) -> Vec<u8> {
    let mut file = magic.to_vec();
    let head = postcard::to_stdvec(&(owner, name));
    let body = postcard::to_stdvec(binding);
    for part in [head, body] {
        let part = part.expect("plain data, and a vector grows");
        file.extend((part.len() as u64).to_le_bytes());
        file.extend(part);
        let hash = XxHash3_128::oneshot(&file);
        file.extend(hash.to_le_bytes());
    }
    file
}

/// Reads a name's file: the name, and its binding. `None` for each that is damaged.
pub(super) fn decode(file: &[u8]) -> (Option<String>, Option<Binding>) {
    let mut at = MAGIC.len();
    let is_before = file.get(..at) == Some(MAGIC_BEFORE);
    if !is_before && file.get(..at) != Some(MAGIC) {
        return (None, None);
    }
    let mut part = || {
        let len = u64::from_le_bytes(*file.get(at..)?.first_chunk()?);
        let start = at + 8;
        let end = start.checked_add(usize::try_from(len).ok()?)?;
        let hash = file.get(end..)?.first_chunk::<HASH_BYTES>()?;
        let is_whole = XxHash3_128::oneshot(&file[..end]) == u128::from_le_bytes(*hash);
        at = end + HASH_BYTES;
        is_whole.then(|| (&file[start..end], at == file.len()))
    };
    let Some((head, _)) = part() else {
        return (None, None);
    };
    let name = postcard::from_bytes::<(PublicKey, String)>(head);
    let body = part().filter(|(_, is_end)| *is_end);
    let binding = body.and_then(|(body, _)| match is_before {
        true => (postcard::from_bytes::<BindingBefore>(body).ok()).map(Binding::from),
        false => postcard::from_bytes(body).ok(),
    });
    (name.ok().map(|(_, name)| name), binding)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: PublicKey = PublicKey([7; 32]);

    fn binding() -> Binding {
        Binding {
            server: Some(ServerId(6)),
            version: 3,
            origin: Origin::User(1000),
            manifest: vec![5; 300],
            extents: vec![BoundExtent {
                id: ExtentId(9),
                bytes: 1 << 30,
                atomics: false,
            }],
            register: Register::default(),
        }
    }

    #[test]
    fn a_binding_comes_back_and_no_changed_or_cut_file_is_taken_for_one() {
        let file = encode(OWNER, "squares", &binding());
        let whole = (Some("squares".to_owned()), Some(binding()));
        assert_eq!(decode(&file), whole);
        for len in 0..file.len() {
            assert_eq!(decode(&file[..len]).1, None, "{len} bytes");
        }
        for at in 0..file.len() {
            let mut changed = file.clone();
            changed[at] ^= 1;
            assert_eq!(decode(&changed).1, None, "byte {at}");
        }
        assert_eq!(decode(&[&file[..], &[0]].concat()).1, None);
    }

    /// A failure means that the format has changed: see [`FORMAT`].
    #[test]
    fn the_bytes_of_a_binding_are_those_of_this_format() {
        let file = encode(OWNER, "squares", &binding());
        assert_eq!(FORMAT, 2);
        assert_eq!(
            XxHash3_128::oneshot(&file),
            0xfc44228a8c044ce917d2d95ca28ff2e9
        );
        let name = name_file(OWNER, "squares");
        let hash = "6db0ac558152e08324cc53f0dcd2e5ac";
        assert_eq!(name, format!("name-{}-{hash}", "07".repeat(32)));
    }

    #[test]
    fn a_binding_of_the_format_before_is_read() {
        let now = binding();
        let before = BindingBefore {
            version: now.version,
            origin: now.origin,
            manifest: now.manifest.clone(),
            extents: now.extents.clone(),
        };
        let file = encode_as(MAGIC_BEFORE, OWNER, "squares", &before);
        // The file that the version before wrote for this binding.
        assert_eq!(
            XxHash3_128::oneshot(&file),
            0xcac40ff5d98a8271781d5fdc9112f1d6
        );
        let expected = Binding {
            server: None,
            ..now
        };
        assert_eq!(decode(&file), (Some("squares".to_owned()), Some(expected)));
    }

    #[test]
    fn the_name_is_known_although_the_rest_of_its_file_is_damaged() {
        let mut file = encode(OWNER, "squares", &binding());
        let end = file.len() - 40;
        file[end] ^= 1;
        assert_eq!(decode(&file), (Some("squares".to_owned()), None));
    }

    #[test]
    fn files_tell_their_extent_and_owner_and_other_files_tell_none() {
        let id = ExtentId(u64::MAX - 1);
        assert_eq!(extent_of(&extent_file(id)), Some(id));
        let longest = "n".repeat(255);
        let file = name_file(OWNER, &longest);
        assert_eq!(owner_of(&file), Some(OWNER));
        assert!(file.len() < 200, "{file}");
        for other in [
            "extent-1",
            "name-",
            "format",
            "new-1",
            "lost+found",
            &file[1..],
        ] {
            assert_eq!((extent_of(other), owner_of(other)), (None, None), "{other}");
        }
    }
}
