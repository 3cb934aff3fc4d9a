//! Programs that are built with a sanitizer: [`refusal`].
//!
//! A sanitizer brings an allocator of its own and has to be the first library, which the preloaded
//! one is. What the file needs says which: all that it shares with libraries has a name in its
//! table of strings.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
};

use crate::program::number;

const PT_LOAD: u64 = 1;
const PT_DYNAMIC: u64 = 2;
const DT_STRTAB: u64 = 5;
const DT_STRSZ: u64 = 10;
/// More is looked at of no file.
const BYTES_MAX: u64 = 256 << 20;

/// What a sanitizer's programs have among their names, and why these are refused.
const SANITIZERS: [(&[u8], &str); 5] = [
    (
        b"__asan_init\0",
        "it is built with AddressSanitizer, which has an allocator of its own; build it without -fsanitize=address",
    ),
    (
        b"__hwasan_init\0",
        "it is built with HWAddressSanitizer, which has an allocator of its own; build it without -fsanitize=hwaddress",
    ),
    (
        b"__tsan_init\0",
        "it is built with ThreadSanitizer, which has an allocator of its own; build it without -fsanitize=thread",
    ),
    (
        b"__msan_init\0",
        "it is built with MemorySanitizer, which has an allocator of its own; build it without -fsanitize=memory",
    ),
    (
        b"liblsan.so",
        "it is built with LeakSanitizer, which has an allocator of its own; build it without -fsanitize=leak",
    ),
];

/// Why a program is refused that has these program headers, if a sanitizer is the reason.
pub(crate) fn refusal<'a>(
    file: &mut File,
    headers: impl Iterator<Item = &'a [u8]> + Clone,
) -> io::Result<Option<&'static str>> {
    let field = |header: &[u8], at: usize| number(&header[at..at + 8]);
    let kind = |header: &[u8]| number(&header[..4]);
    let Some(dynamic) = headers.clone().find(|header| kind(header) == PT_DYNAMIC) else {
        return Ok(None);
    };
    let entries = read(file, field(dynamic, 8), field(dynamic, 32))?;
    let entry = |tag: u64| {
        let mut entries = entries.chunks_exact(16);
        let found = entries.find(|entry| number(&entry[..8]) == tag);
        found.map(|entry| number(&entry[8..]))
    };
    let (Some(address), Some(bytes)) = (entry(DT_STRTAB), entry(DT_STRSZ)) else {
        return Ok(None);
    };
    // Headers tell at which offset, at which address, and how long a part of the file is.
    let part = headers.clone().find(|header| {
        kind(header) == PT_LOAD && address.wrapping_sub(field(header, 16)) < field(header, 32)
    });
    let Some(part) = part else {
        return Ok(None);
    };
    let names = read(file, address - field(part, 16) + field(part, 8), bytes)?;
    let has = |name: &[u8]| names.windows(name.len()).any(|window| window == name);
    let found = SANITIZERS.iter().find(|(name, _)| has(name));
    Ok(found.map(|&(_, why)| why))
}

fn read(file: &mut File, at: u64, bytes: u64) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    file.seek(SeekFrom::Start(at))?;
    file.take(bytes.min(BYTES_MAX)).read_to_end(&mut read)?;
    Ok(read)
}
