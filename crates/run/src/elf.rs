//! Numbers in ELF files of 64 bits, whose lowest byte comes first.

/// Kind of a program header: a part of the file that is loaded.
pub(crate) const PT_LOAD: u64 = 1;

/// Reads a number of up to eight bytes.
///
/// # Panics
/// If `bytes` are more than eight.
pub(crate) fn number(bytes: &[u8]) -> u64 {
    let mut whole = [0; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(whole)
}
