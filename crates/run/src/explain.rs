//! The text that `--explain` prints about a program.

use std::{fmt::Write, path::Path};

use bytesize::ByteSize;

use crate::{FaultsBy, Sizes, program::Program, small::Small};

impl Program {
    /// Returns lines that say what a run would interpose.
    pub(crate) fn explain(&self, path: &Path, sizes: &Sizes) -> String {
        let mut text = String::new();
        let mut line = |line: String| writeln!(text, "{line}").expect("a string takes it all");
        line(format!("program     {}", path.display()));
        if let Some(why) = self.refusal() {
            line(format!("refused     {why}"));
            return text;
        }
        match self {
            Program::Script(by, _) => line(format!(
                "kind        a script of `{by}`, which is interposed, and so is what it becomes by exec; other programs that it starts only with --children"
            )),
            _ => line("kind        dynamically linked".into()),
        }
        let Sizes {
            budget,
            capacity,
            min_bytes,
            small,
            page_size,
            faults_by,
        } = sizes;
        let all = match capacity {
            Some(capacity) => capacity.to_string(),
            None => "what the server has".into(),
        };
        line(format!(
            "budget      {budget} of local memory, {all} in all"
        ));
        let by = match faults_by {
            FaultsBy::Fillers => "filler threads",
            _ => "the thread that touches them (--fillers: by filler threads)",
        };
        line(format!("pages       {page_size} each, brought in by {by}"));
        line(format!(
            "remote      malloc, calloc, realloc, aligned_alloc, posix_memalign, memalign, C++ new: {min_bytes} and more"
        ));
        line(format!(
            "remote      mmap of private anonymous memory, also if it is reserved first: {min_bytes} and more"
        ));
        let place = match small {
            Small::Auto | Small::Yes => "remote",
            Small::No => "local ",
        };
        line(format!(
            "{place}      small objects (requests below {min_bytes}), {small}"
        ));
        let (zeroed, initialised) = match self {
            Program::Dynamic(statics) => (
                format!(", {} here", ByteSize(statics.zeroed)),
                format!(", {} here", ByteSize(statics.initialised)),
            ),
            _ => Default::default(),
        };
        line(format!(
            "remote      static arrays that begin as zeros (.bss{zeroed}): 1 MiB and more in the program, or in a library that is loaded with it"
        ));
        line(format!(
            "local       other static arrays (.data{initialised}; those of allocators, and of libraries that are loaded later), which the budget does not count"
        ));
        line("local       stacks, files, shared memory, executable memory, huge pages, fixed addresses".into());
        line("local       what libraries ask for before farpage's own constructor has run".into());
        line("local       what the program asks the kernel for by raw system calls".into());
        line("fork        children have what the program has at that moment, and share its budget for what they allocate".into());
        text
    }
}
