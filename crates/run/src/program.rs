//! The kind of program that a file holds, and its meaning for interposing.
//!
//! The rule it keeps: a program is refused only for facts that its file states.

use std::{
    ffi::{CString, OsStr},
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    os::unix::{ffi::OsStrExt, fs::PermissionsExt},
    path::Path,
    ptr,
};

use crate::{
    elf::{PT_LOAD, number},
    sanitizer,
};

const SET_ID: u32 = 0o6000;
const PT_INTERP: u64 = 3;
const PT_NOTE: u64 = 4;
const PF_W: u64 = 2;
/// Upper bound of the number of headers of an ELF file.
const HEADERS_MAX: usize = 64;
const NOTE_BYTES_MAX: u64 = 64 << 10;
/// Depth of scripts that start scripts at which the kernel stops.
const SCRIPTS_MAX: usize = 5;

/// Bytes of a program's static variables.
#[derive(Clone, Copy, Default)]
pub(crate) struct Statics {
    /// Bytes with initial values (`.data`).
    pub(crate) initialised: u64,
    /// Bytes that are zeros at first (`.bss`).
    pub(crate) zeroed: u64,
}

/// Kind of a program, read from its file.
pub(crate) enum Program {
    /// Loaded by the dynamic linker, with these static variables.
    Dynamic(Statics),
    /// Loaded by the kernel alone.
    Static,
    Go,
    /// Loaded by musl's dynamic linker.
    Musl,
    SetId,
    /// A file that gives capabilities to the user who runs it.
    Capabilities,
    /// Built with a sanitizer. Holds the reason to refuse it.
    Sanitized(&'static str),
    /// Started by another program: that program's path and arguments, and its kind.
    Script(String, Option<Box<Program>>),
    /// A program that is not of 64 bits, or no program.
    Other,
}

impl Program {
    /// Returns the bytes of static variables that may become remote.
    pub(crate) fn static_bytes(&self) -> u64 {
        match self {
            Program::Dynamic(statics) => statics.zeroed,
            _ => 0,
        }
    }

    pub(crate) fn read(path: &Path) -> io::Result<Program> {
        Program::read_as(path, SCRIPTS_MAX)
    }

    /// Reads a program, following scripts to a depth of `depth`.
    fn read_as(path: &Path, depth: usize) -> io::Result<Program> {
        if fs::metadata(path)?.permissions().mode() & SET_ID != 0 {
            return Ok(Program::SetId);
        }
        if has_capabilities(path) {
            return Ok(Program::Capabilities);
        }
        let mut file = File::open(path)?;
        let mut head = Vec::new();
        file.by_ref().take(256).read_to_end(&mut head)?;
        if let Some(line) = head.strip_prefix(b"#!") {
            let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default();
            let line = line.trim_ascii();
            let by = line.split(|byte| byte.is_ascii_whitespace()).next();
            let by = Path::new(OsStr::from_bytes(by.unwrap_or_default()));
            // A missing program is reported by the kernel.
            let by = (depth.checked_sub(1)).and_then(|depth| Program::read_as(by, depth).ok());
            let line = String::from_utf8_lossy(line).into_owned();
            return Ok(Program::Script(line, by.map(Box::new)));
        }
        // 64 bits, little-endian.
        if head.len() < 64 || !head.starts_with(b"\x7fELF\x02\x01") {
            return Ok(Program::Other);
        }
        let (first, size) = (number(&head[32..40]), number(&head[54..56]) as usize);
        let count = (number(&head[56..58]) as usize).min(HEADERS_MAX);
        if size < 56 {
            return Ok(Program::Other);
        }
        let mut headers = vec![0; size * count];
        file.seek(SeekFrom::Start(first))?;
        file.read_exact(&mut headers)?;
        let (mut is_dynamic, mut statics) = (false, Statics::default());
        for header in headers.chunks_exact(size) {
            let kind = number(&header[..4]);
            if kind == PT_LOAD && number(&header[4..8]) & PF_W != 0 {
                let (filled, bytes) = (number(&header[32..40]), number(&header[40..48]));
                statics.initialised += filled;
                statics.zeroed += bytes.saturating_sub(filled);
            }
            if kind != PT_INTERP && kind != PT_NOTE {
                continue;
            }
            let mut contents = Vec::new();
            file.seek(SeekFrom::Start(number(&header[8..16])))?;
            let bytes = number(&header[32..40]).min(NOTE_BYTES_MAX);
            file.by_ref().take(bytes).read_to_end(&mut contents)?;
            let holds = |part: &[u8]| contents.windows(part.len()).any(|at| at == part);
            // Name of a note of Go's linker: the program's build id.
            if kind == PT_NOTE && holds(b"\x04\0\0\0Go\0\0") {
                return Ok(Program::Go);
            }
            if kind == PT_INTERP && holds(b"/ld-musl-") {
                return Ok(Program::Musl);
            }
            is_dynamic |= kind == PT_INTERP;
        }
        if !is_dynamic {
            return Ok(Program::Static);
        }
        let sanitized = sanitizer::refusal(&mut file, headers.chunks_exact(size))?;
        Ok(sanitized.map_or(Program::Dynamic(statics), Program::Sanitized))
    }

    /// Returns why the program is not run.
    pub(crate) fn refusal(&self) -> Option<String> {
        let why = match self {
            Program::Dynamic(_) => return None,
            Program::Script(line, by) => {
                let why = by.as_ref()?.refusal()?;
                return Some(format!("it is a script of `{line}`: {why}"));
            }
            Program::Static => {
                "it is statically linked, so that no library can be put before its own functions; use a build that is dynamically linked"
            }
            Program::Go => "it is a Go program, whose runtime asks the kernel for memory by itself",
            Program::Musl => "its C library is musl, and farpage's is glibc; use a build for glibc",
            Program::SetId => {
                "it is set-user-ID or set-group-ID, and the system preloads nothing into those; a copy of the file is neither"
            }
            Program::Capabilities => {
                "its file has capabilities (`getcap`), and the system preloads nothing into those; a copy of the file has none"
            }
            Program::Sanitized(why) => why,
            Program::Other => "it is no 64-bit program of this machine",
        };
        Some(why.to_owned())
    }
}

/// True if the file gives capabilities to the user who runs it.
fn has_capabilities(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: two strings of C's; nothing is written.
    let bytes = unsafe {
        let name = c"security.capability".as_ptr();
        libc::getxattr(path.as_ptr(), name, ptr::null_mut(), 0)
    };
    bytes > 0
}
