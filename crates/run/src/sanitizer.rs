//! Programs that are built with a sanitizer: [`refusal`].
//!
//! A sanitizer brings an allocator of its own and has to be the first library, which the preloaded
//! one is. The program's table of strings names the sanitizer, as it names all symbols that the
//! program shares with libraries.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
};

use memchr::memmem;

use crate::elf::{PT_LOAD, number};

const PT_DYNAMIC: u64 = 2;
const DT_STRTAB: u64 = 5;
const DT_STRSZ: u64 = 10;
/// Upper bound of bytes that are read of a table.
const BYTES_MAX: u64 = 256 << 20;

/// Symbols of programs with a sanitizer, and the reasons to refuse them.
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

/// Returns why a program with these program headers is refused, if a sanitizer is the reason.
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
    // Headers give the file offset, the address and the length of each part of a file.
    let part = headers.clone().find(|header| {
        kind(header) == PT_LOAD && address.wrapping_sub(field(header, 16)) < field(header, 32)
    });
    let Some(part) = part else {
        return Ok(None);
    };
    let names = read(file, address - field(part, 16) + field(part, 8), bytes)?;
    let found = SANITIZERS
        .iter()
        .find(|(name, _)| memmem::find(&names, name).is_some());
    Ok(found.map(|&(_, why)| why))
}

fn read(file: &mut File, at: u64, bytes: u64) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    file.seek(SeekFrom::Start(at))?;
    file.take(bytes.min(BYTES_MAX)).read_to_end(&mut read)?;
    Ok(read)
}
