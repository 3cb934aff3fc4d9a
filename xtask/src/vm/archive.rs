//! An archive in the form that Linux unpacks into its first file system (cpio, "newc").
//!
//! The rule it keeps: all entries come from this process's memory, so no folder has to be laid out
//! first and no root is needed. Archives may follow one another in one file; the kernel unpacks
//! them in turn. The form: `Documentation/driver-api/early-userspace/buffer-format.rst`.

/// An archive that grows by one entry at a time.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    /// Number of the last entry: entries with the same number would be links to one file.
    entries: u32,
}

impl Archive {
    pub(crate) fn directory(&mut self, path: &str) {
        self.entry(path, 0o040_755, b"");
    }

    pub(crate) fn file(&mut self, path: &str, executable: bool, contents: &[u8]) {
        let mode = if executable { 0o100_755 } else { 0o100_644 };
        self.entry(path, mode, contents);
    }

    /// Returns the bytes of the archive, complete.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, b"");
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, contents: &[u8]) {
        self.entries += 1;
        let length =
            u32::try_from(contents.len()).expect("a file of the archive is smaller than 4 GiB");
        let path_length = u32::try_from(path.len() + 1).expect("paths are short");
        let (owner, group, links, time, device, check) = (0, 0, 1, 0, 0, 0);
        let fields = [
            self.entries,
            mode,
            owner,
            group,
            links,
            time,
            length,
            device,
            device,
            device,
            device,
            path_length,
            check,
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(path.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_laid_out_as_the_kernel_reads_them() {
        let mut archive = Archive::default();
        archive.directory("a");
        archive.file("a/b", true, b"hello");
        let bytes = archive.finish();

        let text = String::from_utf8(bytes).expect("everything in it is text");
        let file = text.find("a/b\0").expect("the file is in it");
        let header = &text[file - 110..file];
        assert!(header.starts_with("070701"));
        assert_eq!(&header[14..22], "000081ed", "a regular file, rwxr-xr-x");
        assert_eq!(&header[54..62], "00000005", "its length");
        assert_eq!(&header[94..102], "00000004", "its name's, with the zero");
        // Name and contents begin at multiples of four.
        assert_eq!(&text[file + 6..file + 14], "hello\0\0\0");
        assert!(text.trim_end_matches('\0').ends_with("TRAILER!!!"));
    }
}
