//! Options that C programs pass: structs that may grow, whose zero bytes mean "default", and their
//! strings.

use std::{
    ffi::{CStr, c_char},
    mem, ptr, slice,
};

use farpage::{Codec, Redundancy};

use crate::error::Failure;

/// Value of `read_ahead` that switches read-ahead off.
pub const FARPAGE_READ_AHEAD_OFF: u32 = u32::MAX;

/// Reads a codec by its name. Null is none.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn codec(name: *const c_char) -> Result<Option<Codec>, Failure> {
    // SAFETY: the caller's promise.
    let name = unsafe { text(name, "`codec`") }?;
    let codec = name.map(str::parse::<Codec>).transpose();
    codec.map_err(|error| Failure::invalid(error.to_string()))
}

/// Reads a redundancy by its name. Null is none given.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn redundancy(name: *const c_char) -> Result<Option<Redundancy>, Failure> {
    // SAFETY: the caller's promise.
    let name = unsafe { text(name, "`redundancy`") }?;
    let redundancy = name.map(str::parse::<Redundancy>).transpose();
    redundancy.map_err(|error| Failure::invalid(error.to_string()))
}

pub(crate) fn read_ahead(pages: u32) -> Option<usize> {
    match pages {
        0 => None,
        FARPAGE_READ_AHEAD_OFF => Some(0),
        pages => Some(pages as usize),
    }
}

/// A struct that begins with its own length in bytes (`size_t`), so that programs compiled against
/// an older or newer header are understood.
///
/// # Safety
/// The struct may be all zero bytes, its first field is `struct_bytes: usize`, and it is `repr(C)`.
pub(crate) unsafe trait Growing: Copy {}

/// Reads options that the program passed. Null, and fields that its header did not have, are
/// defaults.
///
/// # Safety
/// `options` is null or points to as many readable bytes as its first field says.
pub(crate) unsafe fn read<T: Growing>(options: *const T) -> Result<T, Failure> {
    // SAFETY: `Growing` says that zero bytes are a value.
    let mut ours: T = unsafe { mem::zeroed() };
    if options.is_null() {
        return Ok(ours);
    }
    // SAFETY: the caller's struct begins with this field.
    let given = unsafe { options.cast::<usize>().read() };
    if given < mem::size_of::<usize>() || given > 4096 {
        return Err(Failure::invalid(format!(
            "options of {given} bytes: set `struct_bytes` to `sizeof` the struct, and what is not used to zero"
        )));
    }
    let common = given.min(mem::size_of::<T>());
    // SAFETY: the caller vouches for `given` bytes; ours has `size_of::<T>()`, any of which may be
    // any of a `T` that the program wrote.
    let beyond = unsafe {
        ptr::copy_nonoverlapping(
            options.cast::<u8>(),
            ptr::from_mut(&mut ours).cast::<u8>(),
            common,
        );
        slice::from_raw_parts(options.cast::<u8>().add(common), given - common)
    };
    if beyond.iter().any(|&byte| byte != 0) {
        return Err(Failure::invalid(
            "options that this libfarpage does not know: it is older than the farpage.h that the program was compiled with",
        ));
    }
    Ok(ours)
}

/// Reads a string that the program passed. Null is none.
///
/// # Safety
/// `text` is null or a string that ends with a zero byte and does not change during the call.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    match text.to_str() {
        Ok(text) => Ok(Some(text)),
        Err(_) => Err(Failure::invalid(format!("{what} is not UTF-8"))),
    }
}

/// Returns the place for a function's result. Null is an error.
///
/// # Safety
/// `out` is null or may be written.
pub(crate) unsafe fn out<'a, T>(out: *mut T) -> Result<&'a mut T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { out.as_mut() }.ok_or_else(|| Failure::invalid("no place for the result: it is null"))
}
