//! The variables by which `farpage run` passes options to this library.
//!
//! The rule it keeps: a program that is not to be interposed never sees one of them. The
//! environment's list is edited in place: programs define `unsetenv` and `setenv` of their own,
//! bash for one, which know nothing of the list before `main`.

use std::{
    ffi::{CStr, CString, c_char},
    ptr,
    sync::OnceLock,
};

/// Prefix of the variables that `farpage run` sets.
pub(crate) const PREFIX: &str = "FARPAGE_RUN_";
/// Prefix of the variables that the runtime reads.
const RUNTIMES: &[u8] = b"FARPAGE_";
const PRELOAD: &[u8] = b"LD_PRELOAD=";
/// The runtime's variable that `farpage run` sets if the user has not.
const PAGE_SIZE: &[u8] = b"FARPAGE_PAGE_SIZE=";

/// Number of entries of an environment that fit on the stack.
const SOME: usize = 512;

unsafe extern "C" {
    static mut environ: *mut *mut c_char;
}

/// The variables at the start.
struct Variables {
    /// Whole entries that `farpage run` has set.
    ours: Vec<CString>,
    /// Whole entries that the runtime reads.
    runtimes: Vec<CString>,
    /// Name of this library, as in `LD_PRELOAD`.
    libraries: Vec<u8>,
    /// Whole entry `LD_PRELOAD` with these libraries alone.
    preload: CString,
}

static VARIABLES: OnceLock<Variables> = OnceLock::new();

/// Reads one of the variables that `farpage run` has set, with its value at the start.
pub(crate) fn variable(name: &str) -> Option<String> {
    let name = format!("{PREFIX}{name}");
    let Some(variables) = VARIABLES.get() else {
        return std::env::var(name).ok();
    };
    let mut entries = variables.ours.iter().map(|entry| entry.to_bytes());
    let value = entries.find_map(|entry| {
        let value = entry.strip_prefix(name.as_bytes())?;
        value.strip_prefix(b"=")
    });
    value.map(|value| String::from_utf8_lossy(value).into_owned())
}

/// Keeps the variables for [`with_ours`].
pub(crate) fn keep() {
    let libraries = variable("LIBRARIES").unwrap_or_default();
    let mut variables = Variables {
        ours: Vec::new(),
        runtimes: Vec::new(),
        preload: joined(&[PRELOAD, libraries.as_bytes()]),
        libraries: libraries.into_bytes(),
    };
    // SAFETY: the constructor runs before the program's threads.
    for entry in unsafe { entries(environ.cast()) } {
        // SAFETY: entries are strings of C's.
        let entry = unsafe { CStr::from_ptr(*entry) };
        match entry.to_bytes() {
            bytes if bytes.starts_with(PREFIX.as_bytes()) => variables.ours.push(entry.to_owned()),
            bytes if bytes.starts_with(RUNTIMES) => variables.runtimes.push(entry.to_owned()),
            _ => {}
        }
    }
    let _ = VARIABLES.set(variables);
}

/// Takes the variables of `farpage run` and its libraries out of the environment.
pub(crate) fn leave() {
    let Some(variables) = VARIABLES.get() else {
        return;
    };
    let adds_page_size = variable("ADDS_PAGE_SIZE").is_some();
    // SAFETY: the program's threads do not run yet, and the runtime's read no variables any more.
    // The list lies in memory that may be written, and only becomes shorter.
    unsafe {
        if environ.is_null() {
            return;
        }
        let (mut from, mut to) = (environ, environ);
        while !(*from).is_null() {
            let entry = CStr::from_ptr(*from).to_bytes();
            if let Some(preload) = entry.strip_prefix(PRELOAD) {
                let others = others(preload, &variables.libraries);
                if !others.is_empty() {
                    // Never freed: the string is the program's from now on.
                    *to = joined(&[PRELOAD, &others]).into_raw();
                    to = to.add(1);
                }
            } else if !(entry.starts_with(PREFIX.as_bytes())
                || adds_page_size && entry.starts_with(PAGE_SIZE))
            {
                *to = *from;
                to = to.add(1);
            }
            from = from.add(1);
        }
        *to = ptr::null_mut();
    }
}

/// Calls `with` with the environment `theirs`, extended by the variables and the libraries.
///
/// A child made by `vfork` frees nothing that is allocated here, so the usual case allocates
/// nothing.
///
/// # Safety
/// `theirs` is an environment, or null.
pub(crate) unsafe fn with_ours<T>(
    theirs: *const *const c_char,
    with: impl FnOnce(*const *const c_char) -> T,
) -> T {
    let Some(variables) = VARIABLES.get() else {
        return with(theirs);
    };
    // SAFETY: the caller's promise.
    let theirs = unsafe { entries(theirs) };
    let most = theirs.len() + variables.ours.len() + variables.runtimes.len() + 2;
    let (mut some, mut many) = ([ptr::null(); SOME], Vec::new());
    let list = if most <= SOME {
        &mut some[..]
    } else {
        many.resize(most, ptr::null());
        &mut many[..]
    };
    let mut count = 0;
    let mut push = |entry| {
        list[count] = entry;
        count += 1;
    };
    let mut composed = None;
    for &entry in theirs {
        // SAFETY: the caller's promise.
        let bytes = unsafe { CStr::from_ptr(entry) }.to_bytes();
        if let Some(preload) = bytes.strip_prefix(PRELOAD) {
            if preload != variables.libraries {
                let others = others(preload, &variables.libraries);
                composed = Some(joined(&[PRELOAD, &variables.libraries, b":", &others]));
            }
        } else if !bytes.starts_with(PREFIX.as_bytes()) {
            push(entry);
        }
    }
    variables.ours.iter().for_each(|entry| push(entry.as_ptr()));
    for entry in &variables.runtimes {
        let name = entry
            .to_bytes()
            .split_inclusive(|&byte| byte == b'=')
            .next();
        let is_set = |&at: &*const c_char| {
            // SAFETY: the caller's promise.
            let bytes = unsafe { CStr::from_ptr(at) }.to_bytes();
            name.is_some_and(|name| bytes.starts_with(name))
        };
        if !theirs.iter().any(is_set) {
            push(entry.as_ptr());
        }
    }
    push(composed.as_ref().unwrap_or(&variables.preload).as_ptr());
    with(list.as_ptr())
}

/// Returns the entries of an environment.
///
/// # Safety
/// `of` is an environment, or null, and is not changed meanwhile.
unsafe fn entries<'a>(of: *const *const c_char) -> &'a [*const c_char] {
    if of.is_null() {
        return &[];
    }
    let mut count = 0;
    // SAFETY: the caller's promise: a null ends the list.
    unsafe {
        while !(*of.add(count)).is_null() {
            count += 1;
        }
        std::slice::from_raw_parts(of, count)
    }
}

/// Returns the libraries of an `LD_PRELOAD` without `ours`, which is one, too.
fn others(preload: &[u8], ours: &[u8]) -> Vec<u8> {
    let is_ours = |name: &[u8]| ours.split(|&byte| byte == b':').any(|of| of == name);
    let names = preload.split(|byte| b" :".contains(byte));
    let others: Vec<&[u8]> = names
        .filter(|name| !name.is_empty() && !is_ours(name))
        .collect();
    others.join(&b':')
}

fn joined(parts: &[&[u8]]) -> CString {
    CString::new(parts.concat()).expect("parts of strings of C's")
}
