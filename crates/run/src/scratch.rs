//! The launcher's folder: sockets, and files that programs leave for the launcher.
//!
//! The rule it keeps: the paths of its files fit into `LD_PRELOAD`, which splits at spaces and
//! colons, and into the address of a socket, which has 107 bytes.

use std::{
    env,
    ffi::OsString,
    io,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// The longest path of a directory that leaves room for the folder's name and a socket's in it.
const FOLDER_BYTES_MAX: usize = 60;

/// Makes the folder, in `TMPDIR` or in a usual place.
pub(crate) fn make() -> Result<TempDir> {
    let asked = env::temp_dir();
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let usual = ["/tmp", "/var/tmp", "/dev/shm"].map(PathBuf::from);
    let mut failed: Option<io::Error> = None;
    for place in [asked].into_iter().chain(usual).chain(runtime) {
        if !place.is_absolute() || !is_plain(&place) || place.as_os_str().len() > FOLDER_BYTES_MAX {
            continue;
        }
        match tempfile::Builder::new()
            .prefix("farpage-run-")
            .tempdir_in(&place)
        {
            Ok(folder) => return Ok(folder),
            Err(error) => {
                failed.get_or_insert(error);
            }
        }
    }
    Err(failed.unwrap_or_else(|| io::ErrorKind::NotFound.into())).context(
        "cannot make a directory for sockets: set TMPDIR to one that can be written to, with a short path without spaces and colons",
    )
}

/// Returns a path of the library that `LD_PRELOAD` can hold: a link, if its own cannot.
pub(crate) fn preloadable(library: PathBuf, folder: &Path) -> Result<OsString> {
    if is_plain(&library) {
        return Ok(library.into_os_string());
    }
    let link = folder.join("preload.so");
    symlink(&library, &link).context("cannot make a link to the library")?;
    Ok(link.into_os_string())
}

/// True if no reader of the path gives a byte of it a special meaning.
fn is_plain(path: &Path) -> bool {
    let plain = |&byte: &u8| byte.is_ascii_alphanumeric() || b"/._-+@%~,=".contains(&byte);
    path.as_os_str().as_bytes().iter().all(plain)
}
