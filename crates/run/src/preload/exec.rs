//! `exec` and `posix_spawn`.
//!
//! The rules: the process that `farpage run` started stays interposed whatever program it becomes,
//! so that `env`, `nice` and scripts can start a program. The programs that it starts in turn are
//! interposed only with `--children`. A program that cannot be interposed is noted (`starts.rs`).

use std::{
    ffi::{CStr, CString, OsStr, c_char, c_int},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process, ptr,
};

use crate::{
    Inside, environment, filter,
    local_strings::{self, LocalStrings, Strings},
    next::next,
    program::Program,
    say, starts, state,
};

next! {
    /// `execve`.
    later_execve = c"execve"(path: *const c_char, arguments: Strings, variables: Strings) -> c_int, else -1;
    /// `execvpe`.
    later_execvpe = c"execvpe"(file: *const c_char, arguments: Strings, variables: Strings) -> c_int, else -1;
    /// `fexecve`.
    later_fexecve = c"fexecve"(fd: c_int, arguments: Strings, variables: Strings) -> c_int, else -1;
    /// `execveat`.
    later_execveat = c"execveat"(folder: c_int, path: *const c_char, arguments: Strings, variables: Strings, flags: c_int) -> c_int, else -1;
    /// `posix_spawn`.
    later_posix_spawn = c"posix_spawn"(process: *mut libc::pid_t, path: *const c_char, actions: Actions, attributes: Attributes, arguments: Strings, variables: Strings) -> c_int, else libc::ENOSYS;
    /// `posix_spawnp`.
    later_posix_spawnp = c"posix_spawnp"(process: *mut libc::pid_t, file: *const c_char, actions: Actions, attributes: Attributes, arguments: Strings, variables: Strings) -> c_int, else libc::ENOSYS;
}

unsafe extern "C" {
    static environ: Strings;
}

/// Makes this process another program, whose path `path` finds. `become_it` calls `exec` with the
/// environment that it is given.
///
/// # Safety
/// `variables` is an environment, or null.
unsafe fn exec(
    path: impl FnOnce() -> PathBuf,
    variables: Strings,
    become_it: impl FnOnce(Strings) -> c_int,
) -> c_int {
    if !state::starts_interposed() {
        return become_it(variables);
    }
    let is_refused = {
        // Must end before the call: a child made by `vfork` would leave its parent's thread inside.
        let _inside = Inside::enter();
        let path = path();
        starts::note(state::folder(), &path);
        refuses(&path)
    };
    let code = match is_refused {
        true => become_it(variables),
        // SAFETY: the caller's promise.
        false => unsafe { environment::with_ours(variables, become_it) },
    };
    // The call has failed, with an `errno` that is kept.
    let _inside = Inside::enter();
    take_note();
    code
}

/// Takes away the note that this process is not interposed.
pub(crate) fn take_note() {
    let name = format!("{}{}", starts::PREFIX, process::id());
    let _ = fs::remove_file(state::folder().join(name));
}

/// Notes that another process is started whose program cannot be interposed.
fn note_refused(path: &Path) {
    let mut hash = DefaultHasher::new();
    path.hash(&mut hash);
    starts::write(
        state::folder(),
        &format!("refused.{:x}", hash.finish()),
        path,
    );
}

/// Starts a program in another process, as [`exec`] does in this one.
///
/// # Safety
/// As [`exec`].
unsafe fn spawn(
    path: impl FnOnce() -> PathBuf,
    variables: Strings,
    start: impl FnOnce(Strings) -> c_int,
) -> c_int {
    if !state::has_children_interposed() {
        return start(variables);
    }
    let _inside = Inside::enter();
    let path = path();
    if refuses(&path) {
        note_refused(&path);
        return start(variables);
    }
    // SAFETY: the caller's promise.
    unsafe { environment::with_ours(variables, start) }
}

/// Says that a program will not get the rights of its file's owner: the filter of in-thread faults
/// takes such rights away, unless root has installed it.
fn warn_of_rights(path: impl FnOnce() -> PathBuf) {
    if !filter::takes_rights_away() {
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    let _inside = Inside::enter();
    let path = path();
    let is_set_user_id = |file: fs::Metadata| file.permissions().mode() & 0o6000 != 0;
    if path.metadata().is_ok_and(is_set_user_id) || has_capabilities(&path) {
        say(&format!(
            "{} runs without the rights that its file gives (no new privileges), as the filter of in-thread faults stays with it: --fillers leaves them",
            path.display()
        ));
    }
}

/// True if a file gives capabilities to the program that runs it.
fn has_capabilities(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    let name = c"security.capability".as_ptr();
    // SAFETY: strings of C's; nothing is written to a buffer of no bytes.
    unsafe { libc::getxattr(path.as_ptr(), name, ptr::null_mut(), 0) > 0 }
}

/// True if the program's file says that it cannot be interposed.
fn refuses(path: &Path) -> bool {
    Program::read(path).is_ok_and(|program| program.refusal().is_some())
}

/// Returns a path that the program has passed.
///
/// # Safety
/// `of` is a string of C's.
unsafe fn path(of: *const c_char) -> PathBuf {
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(of) }.to_bytes();
    PathBuf::from(OsStr::from_bytes(bytes))
}

/// Returns a program's path, found in `PATH` as `execvp` finds it.
///
/// # Safety
/// As [`path`].
unsafe fn found(file: *const c_char) -> PathBuf {
    // SAFETY: the caller's promise.
    let file = unsafe { path(file) };
    if file.as_os_str().as_bytes().contains(&b'/') {
        return file;
    }
    let folders = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut places = std::env::split_paths(&folders).map(|folder| folder.join(&file));
    let is_there = |path: &PathBuf| {
        use std::os::unix::fs::PermissionsExt;
        let file = path.metadata();
        file.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    places.find(is_there).unwrap_or(file)
}

/// Returns the path of the file that a descriptor has open.
fn opened(fd: c_int) -> PathBuf {
    let link = PathBuf::from(format!("/proc/self/fd/{fd}"));
    link.read_link().unwrap_or(link)
}

/// Returns a program's path, as `execveat` finds it.
///
/// # Safety
/// As [`path`].
unsafe fn found_in(folder: c_int, at: *const c_char) -> PathBuf {
    // SAFETY: the caller's promise.
    match unsafe { path(at) } {
        empty if empty.as_os_str().is_empty() => opened(folder),
        path if folder == libc::AT_FDCWD => path,
        path => opened(folder).join(path),
    }
}

/// Defines functions that start the program whose path is `$path`, by [`exec`] or [`spawn`].
macro_rules! starts {
    ($($by:ident $name:ident = $later:ident($($arg:ident: $type:ty),+) of $path:expr, with [$($file:ident)?] $arguments:ident and $variables:ident;)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            #[doc = concat!("As `", stringify!($name), "`.")]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),+) -> c_int {
                // SAFETY: the caller's promise.
                unsafe {
                    local_strings::free_left();
                    let [arguments, variables] = [$arguments, $variables].map(|it| LocalStrings::of(it));
                    let $arguments = arguments.list();
                    $(
                        let file = [$file, ptr::null()];
                        let file = LocalStrings::of(file.as_ptr());
                        let $file = file.first();
                    )?
                    warn_of_rights(|| $path);
                    $by(|| $path, variables.list(), |$variables| $later($($arg),+))
                }
            }
        )+
    };
}

starts! {
    exec execve = later_execve(at: *const c_char, arguments: Strings, variables: Strings) of path(at), with [at] arguments and variables;
    exec execvpe = later_execvpe(file: *const c_char, arguments: Strings, variables: Strings) of found(file), with [file] arguments and variables;
    exec fexecve = later_fexecve(fd: c_int, arguments: Strings, variables: Strings) of opened(fd), with [] arguments and variables;
    exec execveat = later_execveat(folder: c_int, at: *const c_char, arguments: Strings, variables: Strings, flags: c_int) of found_in(folder, at), with [at] arguments and variables;
    spawn posix_spawn = spawn_by_path(process: *mut libc::pid_t, at: *const c_char, actions: Actions, attributes: Attributes, arguments: Strings, variables: Strings) of path(at), with [at] arguments and variables;
    spawn posix_spawnp = spawn_by_name(process: *mut libc::pid_t, file: *const c_char, actions: Actions, attributes: Attributes, arguments: Strings, variables: Strings) of found(file), with [file] arguments and variables;
}

/// Actions on a new process's descriptors, as `posix_spawn` takes them.
type Actions = *const libc::posix_spawn_file_actions_t;
/// Attributes of a new process, as `posix_spawn` takes them.
type Attributes = *const libc::posix_spawnattr_t;

/// Defines functions that start a process with local copies of its actions and attributes: the
/// child reads them in its parent's memory, without a handler of faults. What the actions lead to
/// is the C library's own memory, which is local.
macro_rules! spawns {
    ($($name:ident = $later:ident;)+) => {
        $(
            /// # Safety
            /// As `posix_spawn`.
            unsafe fn $name(
                process: *mut libc::pid_t,
                program: *const c_char,
                actions: Actions,
                attributes: Attributes,
                arguments: Strings,
                variables: Strings,
            ) -> c_int {
                // SAFETY: the caller's promise.
                unsafe {
                    let actions = actions.as_ref().copied();
                    let attributes = attributes.as_ref().copied();
                    let actions = actions.as_ref().map_or(ptr::null(), ptr::from_ref);
                    let attributes = attributes.as_ref().map_or(ptr::null(), ptr::from_ref);
                    $later(process, program, actions, attributes, arguments, variables)
                }
            }
        )+
    };
}

spawns! {
    spawn_by_path = later_posix_spawn;
    spawn_by_name = later_posix_spawnp;
}

/// Calls `start` with a local copy of a string.
///
/// # Safety
/// `line` is a string of C's, or null.
unsafe fn with_local<T>(line: *const c_char, start: impl FnOnce(*const c_char) -> T) -> T {
    local_strings::free_left();
    let list = [line, ptr::null()];
    // SAFETY: the caller's promise.
    let local = unsafe { LocalStrings::of(list.as_ptr()) };
    start(local.first())
}

next! {
    /// `system`.
    later_system = c"system"(line: *const c_char) -> c_int, else -1;
    /// `popen`.
    later_popen = c"popen"(line: *const c_char, mode: *const c_char) -> *mut libc::FILE, else ptr::null_mut();
}

/// `system`, whose shell gets a local copy of the line.
///
/// # Safety
/// As `system`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn system(line: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { with_local(line, |line| later_system(line)) }
}

/// `popen`, whose shell gets a local copy of the line.
///
/// # Safety
/// As `popen`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn popen(line: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    // SAFETY: the caller's promise.
    unsafe { with_local(line, |line| later_popen(line, mode)) }
}

/// `execv`.
///
/// # Safety
/// As `execv`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn execv(at: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { execve(at, arguments, environ) }
}

/// `execvp`.
///
/// # Safety
/// As `execvp`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { execvpe(file, arguments, environ) }
}

/// Implements `execle`, whose environment lies behind its arguments.
///
/// # Safety
/// As `execve`; `arguments` is a list with an environment behind its null.
unsafe extern "C" fn execle_list(at: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let mut end = arguments;
        while !(*end).is_null() {
            end = end.add(1);
        }
        execve(at, arguments, *end.add(1).cast::<Strings>())
    }
}

/// Defines a function of variably many arguments, which makes a list of them: arguments in
/// registers are stored next to the arguments on the stack.
macro_rules! listed {
    ($($name:ident by $with:path;)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            ///
            /// # Safety
            #[doc = concat!("As `", stringify!($name), "`.")]
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name() {
                #[cfg(target_arch = "x86_64")]
                std::arch::naked_asm!(
                    "pop rax",
                    "push r9",
                    "push r8",
                    "push rcx",
                    "push rdx",
                    "push rsi",
                    "mov rsi, rsp",
                    "push rax",
                    "call {with}",
                    "pop rcx",
                    "add rsp, 40",
                    "push rcx",
                    "ret",
                    with = sym $with,
                );
                #[cfg(target_arch = "aarch64")]
                std::arch::naked_asm!(
                    "stp x6, x7, [sp, #-16]!",
                    "stp x4, x5, [sp, #-16]!",
                    "stp x2, x3, [sp, #-16]!",
                    "stp x30, x1, [sp, #-16]!",
                    "add x1, sp, #8",
                    "bl {with}",
                    "ldr x30, [sp], #64",
                    "ret",
                    with = sym $with,
                );
            }
        )+
    };
}

listed! {
    execl by execv;
    execlp by execvp;
    execle by execle_list;
}
