//! What kind of program a file is, and what that means for interposing.
//!
//! The rule it keeps: a program is refused only for what its file says for sure.

use std::{
    fmt::Write,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use bytesize::ByteSize;

use crate::{Sizes, sanitizer};

const SET_ID: u32 = 0o6000;
const PT_LOAD: u32 = 1;
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;
const PF_W: u32 = 2;
/// More is no header of an ELF file.
const HEADERS_MAX: usize = 64;
const NOTE_BYTES_MAX: u64 = 64 << 10;

/// What is known of a program's file.
pub(crate) enum Program {
    /// Loaded by the dynamic linker, with so many bytes of static variables.
    Dynamic(u64),
    /// Loaded by the kernel alone.
    Static,
    Go,
    SetId,
    /// Built with a sanitizer, and why that is refused.
    Sanitized(&'static str),
    /// Started by another program, whose path this is.
    Script(String),
    /// Not of 64 bits, or no program.
    Other,
}

impl Program {
    pub(crate) fn read(path: &Path) -> io::Result<Program> {
        if fs::metadata(path)?.permissions().mode() & SET_ID != 0 {
            return Ok(Program::SetId);
        }
        let mut file = File::open(path)?;
        let mut head = Vec::new();
        file.by_ref().take(256).read_to_end(&mut head)?;
        if let Some(line) = head.strip_prefix(b"#!") {
            let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default();
            return Ok(Program::Script(
                String::from_utf8_lossy(line).trim().to_owned(),
            ));
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
        let (mut is_dynamic, mut static_bytes) = (false, 0);
        for header in headers.chunks_exact(size) {
            match number(&header[..4]) as u32 {
                PT_INTERP => is_dynamic = true,
                PT_LOAD if number(&header[4..8]) as u32 & PF_W != 0 => {
                    static_bytes += number(&header[40..48]);
                }
                PT_NOTE => {
                    let mut note = Vec::new();
                    file.seek(SeekFrom::Start(number(&header[8..16])))?;
                    let bytes = number(&header[32..40]).min(NOTE_BYTES_MAX);
                    file.by_ref().take(bytes).read_to_end(&mut note)?;
                    // The name of a note of Go's linker: the program's build id.
                    if note.windows(8).any(|name| name == b"\x04\0\0\0Go\0\0") {
                        return Ok(Program::Go);
                    }
                }
                _ => {}
            }
        }
        if !is_dynamic {
            return Ok(Program::Static);
        }
        let sanitized = sanitizer::refusal(&mut file, headers.chunks_exact(size))?;
        Ok(sanitized.map_or(Program::Dynamic(static_bytes), Program::Sanitized))
    }

    /// Why it is not run.
    pub(crate) fn refusal(&self) -> Option<&'static str> {
        match self {
            Program::Dynamic(_) | Program::Script(_) => None,
            Program::Static => Some(
                "it is statically linked, so that no library can be put before its own functions; use a build that is dynamically linked",
            ),
            Program::Go => {
                Some("it is a Go program, whose runtime asks the kernel for memory by itself")
            }
            Program::SetId => Some(
                "it is set-user-ID or set-group-ID, and the system preloads nothing into those",
            ),
            Program::Sanitized(why) => Some(why),
            Program::Other => Some("it is no 64-bit program of this machine"),
        }
    }

    /// What would happen, in lines.
    pub(crate) fn explain(&self, path: &Path, sizes: &Sizes) -> String {
        let mut text = String::new();
        let mut line = |line: String| writeln!(text, "{line}").expect("a string takes it all");
        line(format!("program     {}", path.display()));
        if let Some(why) = self.refusal() {
            line(format!("refused     {why}"));
            return text;
        }
        match self {
            Program::Script(by) => line(format!(
                "kind        a script of `{by}`, which is interposed; what it starts only with --children"
            )),
            _ => line("kind        dynamically linked".into()),
        }
        let Sizes {
            budget,
            capacity,
            min_bytes,
            page_size,
            in_thread,
        } = sizes;
        let all = match capacity {
            Some(capacity) => capacity.to_string(),
            None => "what the server has".into(),
        };
        line(format!(
            "budget      {budget} of local memory, {all} in all"
        ));
        let by = match in_thread {
            true => "the thread that touches them",
            false => "filler threads (--in-thread: by the thread that touches them)",
        };
        line(format!("pages       {page_size} each, brought in by {by}"));
        line(format!(
            "remote      malloc, calloc, realloc, aligned_alloc, posix_memalign, memalign, C++ new: {min_bytes} and more"
        ));
        line(format!(
            "remote      mmap of private anonymous memory, also if it is reserved first: {min_bytes} and more"
        ));
        line(format!(
            "local       small objects (requests below {min_bytes}), which the budget does not count"
        ));
        let bytes = match self {
            Program::Dynamic(bytes) => format!(", {} here", ByteSize(*bytes)),
            _ => String::new(),
        };
        line(format!(
            "local       static arrays (.data and .bss{bytes}), which the budget does not count"
        ));
        line("local       stacks, files, shared memory, executable memory, huge pages, fixed addresses".into());
        line("local       what libraries ask for before farpage's own constructor has run".into());
        line("local       what the program asks the kernel for by raw system calls".into());
        line("fork        refused while something is remote, unless --allow-fork; vfork, posix_spawn and exec work".into());
        text
    }
}

/// A number as it stands in such files: the lowest byte first.
pub(crate) fn number(bytes: &[u8]) -> u64 {
    let mut whole = [0; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(whole)
}
