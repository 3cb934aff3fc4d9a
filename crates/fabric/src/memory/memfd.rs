//! Files in memory (memfd) that cannot be resized.

use std::{ffi::CStr, fs::File, io, os::fd::AsRawFd};

use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::{
        memfd::{MFdFlags, memfd_create},
        stat::{Mode, fchmod},
    },
};

/// Makes an empty file in memory of `bytes` bytes, to be sealed.
pub(super) fn sealable(name: &CStr, bytes: u64) -> io::Result<File> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(name, flags)?);
    // Another user than the server's, who is lent a descriptor to read, cannot reopen it to write.
    // The server's own user can do as it likes with the server anyway.
    fchmod(&file, Mode::S_IRUSR | Mode::S_IWUSR)?;
    file.set_len(bytes)?;
    Ok(file)
}

/// Opens the same file by a description of its own.
pub(super) fn open_anew(file: &File, to_write: bool) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let opened = File::options().read(true).write(to_write).open(path);
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(error.kind(), "/proc is not mounted"),
        _ => error,
    })
}

/// Seals a file against changes of its size. A client that could shrink the file would turn the
/// server's accesses into SIGBUS.
pub(super) fn seal(file: &File) -> io::Result<()> {
    add_seals(file, SealFlag::empty())
}

/// Seals a file like [`seal`], and against new mappings that can be written.
pub(super) fn seal_to_read(file: &File) -> io::Result<()> {
    add_seals(file, SealFlag::F_SEAL_FUTURE_WRITE)
}

/// Checks that a file of another process has `bytes` bytes for good.
pub(super) fn check_sealed(file: &File, bytes: u64) -> io::Result<()> {
    let seals = SealFlag::from_bits_retain(fcntl(file, FcntlArg::F_GET_SEALS)?);
    let size = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    match seals.contains(size) && file.metadata()?.len() == bytes {
        true => Ok(()),
        false => Err(io::Error::other(
            "it is not sealed memory of the right length",
        )),
    }
}

fn add_seals(file: &File, more: SealFlag) -> io::Result<()> {
    let size = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(file, FcntlArg::F_ADD_SEALS(size | more))?;
    Ok(())
}
