//! [`Key`]: a user's private key, kept in a file. It proves which names belong to the user.
//!
//! The rule it keeps: the file is complete and readable by its owner alone from the instant it has
//! its name, and it is never replaced, so that processes that start at once agree on one key. The
//! meaning of a key to a server is left to the [`Host`](crate::host::Host).

use std::{
    env, fs,
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use ed25519_dalek::{Signer, SigningKey, VerifyingKey};
use farpage_wire::{Challenge, PublicKey, Signature, bytes_of_hex, hex_of};

farpage_wire::debug_as_display!(KeyError);

/// Text at the start of a key file, so that no other file is taken for one.
const HEADER: &str = "farpage-key-ed25519 ";

/// Upper bound of a key file's size. A longer file is no key file.
const KEY_FILE_BYTES: u64 = 1024;

/// A private key. Never printed.
pub struct Key(SigningKey);

/// Reason why there is no key. Only names need one.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The key file has no place: no variable names one, and the user has no home directory.
    #[error(
        "names belong to keys, and there is no place for this user's key file: set FARPAGE_KEY_FILE, XDG_CONFIG_HOME or HOME"
    )]
    NoPlace,
    /// The file cannot be read or made.
    #[error(
        "names belong to keys, and the key file {path} cannot be {attempt}: {source}; set FARPAGE_KEY_FILE to name another"
    )]
    Io {
        /// Path of the key file.
        path: PathBuf,
        /// The word "read" or "made".
        attempt: &'static str,
        /// Error from the system.
        r#source: io::Error,
    },
    /// Other users can read or change the file.
    #[error(
        "the key file {path} can be read or changed by others (mode {mode:03o}): `chmod 600` it, or make a new one if others may have read it"
    )]
    Shared {
        /// Path of the key file.
        path: PathBuf,
        /// Permission bits of the key file.
        mode: u32,
    },
    /// The file is no key file.
    #[error(
        "{path} is no key file: it must be a file of one line, as farpage makes it; set FARPAGE_KEY_FILE to name another"
    )]
    Damaged {
        /// Path of the file.
        path: PathBuf,
    },
}

impl Key {
    /// Returns the path of a user's key file: `FARPAGE_KEY_FILE`, else `farpage/key` in
    /// `XDG_CONFIG_HOME` or `~/.config`.
    ///
    /// # Errors
    /// [`KeyError::NoPlace`]
    pub fn default_file() -> Result<PathBuf, KeyError> {
        let set = |variable| env::var_os(variable).filter(|value| !value.is_empty());
        if let Some(file) = set("FARPAGE_KEY_FILE") {
            return Ok(file.into());
        }
        // The XDG specification says that a relative path counts as none.
        let absolute = |variable| set(variable).map(PathBuf::from).filter(|p| p.is_absolute());
        absolute("XDG_CONFIG_HOME")
            .or_else(|| absolute("HOME").map(|home| home.join(".config")))
            .map(|config| config.join("farpage/key"))
            .ok_or(KeyError::NoPlace)
    }

    /// Reads the key in `file`, and makes the file if it does not exist.
    ///
    /// # Errors
    /// [`KeyError`]
    pub fn load_or_make(file: &Path) -> Result<Self, KeyError> {
        match Self::load(file) {
            Err(KeyError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        Self::make(file).map_err(|source| KeyError::Io {
            path: file.to_owned(),
            attempt: "made",
            source,
        })?;
        // The file is ours, or that of a process that was faster.
        Self::load(file)
    }

    fn load(file: &Path) -> Result<Self, KeyError> {
        let failed = |source| KeyError::Io {
            path: file.to_owned(),
            attempt: "read",
            source,
        };
        let damaged = || KeyError::Damaged {
            path: file.to_owned(),
        };
        // Without O_NONBLOCK, opening a pipe would wait for its writer.
        let options = fs::File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .clone();
        let opened = options.open(file).map_err(failed)?;
        let metadata = opened.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(damaged());
        }
        let mode = metadata.mode() & 0o777;
        if mode & 0o077 != 0 {
            let path = file.to_owned();
            return Err(KeyError::Shared { path, mode });
        }
        let mut text = String::new();
        let mut beginning = opened.take(KEY_FILE_BYTES);
        match beginning.read_to_string(&mut text) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(damaged()),
            read => read.map_err(failed)?,
        };
        text.strip_prefix(HEADER)
            .and_then(|digits| bytes_of_hex(digits.trim_end()))
            .map(|bytes| Self(SigningKey::from_bytes(&bytes)))
            .ok_or_else(damaged)
    }

    /// Makes `file` unless it exists: writes it under another name, which only its owner may read,
    /// then links it.
    fn make(file: &Path) -> io::Result<()> {
        let directory = match file.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes)?;
        let mut made = tempfile::NamedTempFile::new_in(directory)?;
        writeln!(made, "{HEADER}{}", hex_of(&bytes))?;
        made.as_file().sync_all()?;
        match made.persist_noclobber(file) {
            Err(error) if error.error.kind() != io::ErrorKind::AlreadyExists => Err(error.error),
            _ => Ok(()),
        }
    }

    /// Returns the public half, which servers know.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key().to_bytes())
    }

    /// Proves to the server that sent `challenge` that we hold this key.
    pub fn sign(&self, challenge: &Challenge) -> Signature {
        let signature = self.0.sign(&challenge.message());
        Signature([*signature.r_bytes(), *signature.s_bytes()])
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key({})", self.public())
    }
}

/// Makes a challenge from random bytes, which cannot be guessed.
pub(crate) fn challenge() -> io::Result<Challenge> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)?;
    Ok(Challenge(bytes))
}

/// True if `signature` of `challenge` was made with the private half of `key`.
pub(crate) fn is_signed(key: &PublicKey, challenge: &Challenge, signature: &Signature) -> bool {
    let Signature([r, s]) = *signature;
    let signature = ed25519_dalek::Signature::from_components(r, s);
    VerifyingKey::from_bytes(&key.0)
        .is_ok_and(|key| key.verify_strict(&challenge.message(), &signature).is_ok())
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt, sync::Barrier, thread};

    use super::*;

    #[test]
    fn processes_that_start_at_once_agree_on_one_key_that_only_its_owner_reads() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("config/farpage/key");
        let start = Barrier::new(16);
        let made = || {
            start.wait();
            Key::load_or_make(&file).expect("a key").public()
        };
        let keys = thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(made)).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined.collect::<Result<Vec<_>, _>>().expect("no panic")
        });
        assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
        let mode = |path: &Path| fs::metadata(path).expect("there").mode() & 0o777;
        assert_eq!(mode(&file), 0o600);
        assert_eq!(mode(file.parent().expect("a folder")), 0o700);
        let left = fs::read_dir(file.parent().expect("a folder")).expect("readable");
        assert_eq!(left.count(), 1, "nothing but the key is left");
    }

    #[test]
    fn a_key_that_others_may_read_or_that_is_none_is_an_error_and_stays_as_it_is() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("key");
        Key::load_or_make(&file).expect("a key");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("ours");
        let error = Key::load_or_make(&file).expect_err("the group may read it");
        assert!(
            matches!(error, KeyError::Shared { mode: 0o640, .. }),
            "{error}"
        );
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("ours");
        fs::write(&file, "mine\n").expect("ours");
        let error = Key::load_or_make(&file).expect_err("something else");
        assert!(matches!(error, KeyError::Damaged { .. }), "{error}");
        assert_eq!(fs::read_to_string(&file).expect("readable"), "mine\n");
        let error = Key::load_or_make(Path::new("/proc/none/key")).expect_err("no such place");
        assert!(error.to_string().contains("/proc/none/key"), "{error}");
    }

    #[test]
    fn a_signature_proves_one_key_for_one_challenge() {
        let directory = tempfile::tempdir().expect("a directory");
        let [ours, theirs] =
            ["a", "b"].map(|name| Key::load_or_make(&directory.path().join(name)).expect("a key"));
        let (asked, other) = (challenge().expect("random"), challenge().expect("random"));
        let signature = ours.sign(&asked);
        assert!(is_signed(&ours.public(), &asked, &signature));
        assert!(!is_signed(&theirs.public(), &asked, &signature));
        assert!(!is_signed(&ours.public(), &other, &signature));
        let Signature([r, mut s]) = signature;
        s[0] ^= 1;
        assert!(!is_signed(&ours.public(), &asked, &Signature([r, s])));
        assert!(!is_signed(&PublicKey([0; 32]), &asked, &signature));
        assert!(!format!("{ours:?}").contains(&hex_of(&ours.0.to_bytes())));
    }
}
