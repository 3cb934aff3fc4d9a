//! System calls of the program that are given remote memory, with in-thread faults.
//!
//! The kernel cannot bring absent pages in then. A filter of system calls (seccomp) tells it to
//! raise SIGSYS instead of making a call that has an address of the arena among its arguments. The
//! handler makes the call as [`farpage_vm::calls`] does, and the program goes on with the call's
//! result. This covers calls from inside the C library (streams, locks, `opendir`) and raw ones
//! alike.
//!
//! Calls that close or replace descriptors of the runtime (`descriptors.rs`) are refused by the
//! filter, too, and so are rings (`io_uring_setup`), which name memory where no filter looks.
//!
//! The rule it keeps: all other calls cost a few comparisons. A filter stays with a process and its
//! children for good, also after `exec`, which removes the handler of SIGSYS. So the filter must
//! never match anything there: the arena lies where the kernel places nothing by itself, and where
//! no filter looks that this process has inherited ([`place`]).
//!
//! Memory that arguments only lead to is invisible to a filter: `calls.rs`.

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    mem,
    ops::Range,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use farpage_vm::calls;
use libc::sock_filter;

use crate::{
    Inside, errno, guesses, limits,
    seccomp::{answer, jump, load, statement},
    set_errno, signals,
    state::{self, GENERATIONS, is_remote},
    statics,
};

/// Number of low address bits that the filter ignores: it compares upper halves.
const WINDOW_BITS: u32 = 32;
/// Addresses at which the arena may begin: above the heaps that sanitizers and runtimes place
/// themselves, and far below executables and libraries.
const PLACES: Range<usize> = 0x1000_0000_0000..0x5000_0000_0000;
const PLACES_TRIED: usize = 64;
/// Number of arenas that there are addresses for.
static ARENAS: AtomicUsize = AtomicUsize::new(0);
/// Number of windows of one arena.
static WINDOWS: AtomicUsize = AtomicUsize::new(0);
/// Size of the largest page: a region of whole pages fits a multiple of it.
const RESERVED_BYTES: usize = 2 << 20;

/// First and last upper half of addresses that the filter looks for. Written before the filter
/// exists, so that its SIGSYS finds them.
static FIRST: AtomicUsize = AtomicUsize::new(usize::MAX);
static LAST: AtomicUsize = AtomicUsize::new(0);

/// True if set-user-ID programs run without their rights, which the filter needed.
static TAKES_RIGHTS_AWAY: AtomicBool = AtomicBool::new(false);

/// True if programs that this process starts do not get the rights of their files' owners.
pub(crate) fn takes_rights_away() -> bool {
    TAKES_RIGHTS_AWAY.load(Ordering::Relaxed)
}

/// True if the filter looks for `at`. The arena may begin later, or end earlier.
fn is_in_window(at: usize) -> bool {
    let upper = at >> WINDOW_BITS;
    FIRST.load(Ordering::Relaxed) <= upper && upper <= LAST.load(Ordering::Relaxed)
}

/// Reserves addresses for an arena of `bytes` bytes, for those of children made by `fork` as far as
/// there is room, and all addresses that share their upper halves. A process whose addresses are
/// limited reserves only its own arena's: the kernel maps nothing near them by itself.
pub(crate) fn place(bytes: usize) -> Result<usize, String> {
    let of_one = bytes.div_ceil(1 << WINDOW_BITS);
    let placed = match limits::are_none() {
        false => place_arenas(1, of_one, bytes.next_multiple_of(RESERVED_BYTES))?,
        true => (1..=GENERATIONS)
            .rev()
            .find_map(|arenas| {
                place_arenas(arenas, of_one, (arenas * of_one) << WINDOW_BITS).transpose()
            })
            .transpose()?,
    };
    placed.ok_or_else(|| format!(
        "there are no addresses for an arena of {bytes} bytes; try a smaller --capacity, a larger `ulimit -v`, or --fillers"
    ))
}

/// Reserves `reserved` bytes of addresses for `arenas` arenas of `of_one` windows each. Returns
/// `None` if there is no such room.
fn place_arenas(arenas: usize, of_one: usize, reserved: usize) -> Result<Option<usize>, String> {
    let windows = arenas * of_one;
    let (first, places) = (
        PLACES.start >> WINDOW_BITS,
        (PLACES.end - PLACES.start) >> WINDOW_BITS,
    );
    for _ in 0..PLACES_TRIED {
        let mut random = 0usize;
        // SAFETY: writes to the variable.
        unsafe { libc::getrandom((&raw mut random).cast(), mem::size_of::<usize>(), 0) };
        let at = (first + random % places) << WINDOW_BITS;
        let flags = libc::MAP_PRIVATE
            | libc::MAP_ANONYMOUS
            | libc::MAP_NORESERVE
            | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: replaces nothing. The call is made by number: our own `mmap` serves the program.
        let made =
            unsafe { libc::syscall(libc::SYS_mmap, at, reserved, libc::PROT_NONE, flags, -1, 0) };
        if made as usize == at {
            if !is_filtered(at, windows)? {
                WINDOWS.store(of_one, Ordering::Relaxed);
                ARENAS.store(arenas, Ordering::Relaxed);
                return Ok(Some(at));
            }
            // SAFETY: made just now, and nobody's.
            unsafe { libc::syscall(libc::SYS_munmap, at, reserved) };
        }
    }
    Ok(None)
}

/// Returns addresses of an arena of a child made by `fork` that has inherited `before` arenas: the
/// filter looks for them, too.
pub(crate) fn place_again(before: usize) -> Result<Range<usize>, String> {
    if before >= ARENAS.load(Ordering::Relaxed) {
        return Err("in-thread faults need addresses that are reserved, and there are none: they are limited (`ulimit -v`), or the --capacity is too large (--fillers does without)".to_owned());
    }
    let windows = WINDOWS.load(Ordering::Relaxed);
    let first = FIRST.load(Ordering::Relaxed) + before * windows;
    Ok(first << WINDOW_BITS..(first + windows) << WINDOW_BITS)
}

/// True if an inherited filter looks at some of `windows` windows from `at` on: a filter of
/// farpage's own, of the interposed program that started this one.
fn is_filtered(at: usize, windows: usize) -> Result<bool, String> {
    static MET: AtomicBool = AtomicBool::new(false);
    #[cfg(target_arch = "x86_64")]
    extern "C" fn meet(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
        MET.store(true, Ordering::Relaxed);
        // SAFETY: the kernel's, valid while the handler runs and nobody else's.
        let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
        registers[libc::REG_RAX as usize] = -libc::greg_t::from(libc::EBADF);
    }
    #[cfg(not(target_arch = "x86_64"))]
    extern "C" fn meet(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {}
    // SAFETY: all zeros is a valid action.
    let [mut action, mut before]: [libc::sigaction; 2] = unsafe { mem::zeroed() };
    action.sa_sigaction = meet as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
    if signals::exchange_kernels(libc::SIGSYS, &action, &mut before) != 0 {
        return Err(no_sigsys());
    }
    MET.store(false, Ordering::Relaxed);
    for window in 0..windows {
        let in_window = at + (window << WINDOW_BITS);
        // SAFETY: writes nothing, to no descriptor.
        unsafe { libc::syscall(libc::SYS_write, -1, in_window, 0) };
    }
    signals::exchange_kernels(libc::SIGSYS, &before, &mut action);
    Ok(MET.load(Ordering::Relaxed))
}

fn no_sigsys() -> String {
    format!(
        "SIGSYS cannot be handled: {}",
        std::io::Error::last_os_error()
    )
}

/// Finds out whether the system allows such a filter.
///
/// # Errors
/// The reason in words.
pub(crate) fn is_available() -> Result<(), String> {
    let action = libc::SECCOMP_RET_TRAP;
    // SAFETY: reads the variable, and changes nothing.
    let answer = unsafe {
        let asks = libc::SECCOMP_GET_ACTION_AVAIL;
        libc::syscall(libc::SYS_seccomp, asks, 0, &raw const action)
    };
    match answer {
        0 => Ok(()),
        _ => Err(format!(
            "this system allows no filter of system calls, which in-thread faults need (seccomp: {})",
            std::io::Error::last_os_error()
        )),
    }
}

/// Installs the filter: from now on this thread, and threads that it starts, may give memory of
/// arenas to system calls. The first arena [begins](place) at `address`. Calls that close or
/// replace one of `descriptors` fail.
pub(crate) fn install(address: usize, descriptors: Range<u32>) -> Result<(), String> {
    let windows = ARENAS.load(Ordering::Relaxed) * WINDOWS.load(Ordering::Relaxed);
    let first = address >> WINDOW_BITS;
    FIRST.store(first, Ordering::Relaxed);
    LAST.store(first + windows - 1, Ordering::Relaxed);
    handle_sigsys()?;
    let mut filter = refuse_to_close(descriptors);
    filter.extend(refuse_rings());
    filter.extend(self::filter(
        |bits| compare(first..first + windows, bits),
        &unless_ours(),
    ));
    set(&mut filter)?;
    if !state::statics().is_empty() {
        let pieces: Vec<_> = state::statics().iter().flat_map(pieces).collect();
        let compare = |bits| compare_pieces(&pieces, bits);
        set(&mut self::filter(compare, &from_code(&statics::code())))?;
    }
    Ok(())
}

/// Installs a filter.
fn set(filter: &mut [sock_filter]) -> Result<(), String> {
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    let set = || {
        // SAFETY: a filter that lasts for the call.
        unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                0,
                &raw const program,
            )
        }
    };
    let mut result = set();
    if result != 0 {
        // A process that is not root must not gain rights by set-user-ID programs under its filter.
        // SAFETY: changes nothing else.
        unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
        result = set();
    }
    if result == 0 {
        // Set just now, or by an interposed program that has become this one.
        // SAFETY: asks, and changes nothing.
        let is_set = unsafe { libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) } == 1;
        TAKES_RIGHTS_AWAY.store(is_set, Ordering::Relaxed);
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(format!(
        "this system allows no filter of system calls, which in-thread faults need (seccomp: {error}); --fillers does without"
    ))
}

/// Returns a filter that ends with `found`, which returns, for calls with an address that `compare`
/// finds: `compare(arguments)` jumps over the statement behind it if one of `arguments` matches.
///
/// The filter first looks at all arguments, and most calls pass there. Then it looks at the call's
/// arguments that are addresses. Calls with addresses in the same arguments share comparisons.
fn filter(compare: impl Fn(u8) -> Vec<sock_filter>, found: &[sock_filter]) -> Vec<sock_filter> {
    const ALL: u8 = 0b11_1111;
    let allow = answer(libc::SECCOMP_RET_ALLOW);
    let mut filter = compare(ALL);
    filter.push(allow);
    filter.push(load(mem::offset_of!(libc::seccomp_data, nr)));
    let mut groups = BTreeMap::<u8, Vec<u32>>::new();
    for number in 0..calls::NUMBERS {
        match calls::addresses(number) {
            0 => {}
            bits => groups.entry(bits).or_default().push(number as u32),
        }
    }
    for (bits, numbers) in groups {
        let mut group = compare(bits);
        group.push(allow);
        group.extend(found);
        // Each number jumps behind the others and the jump to the next group.
        for (at, &number) in numbers.iter().enumerate() {
            let behind = numbers.len() - at;
            filter.push(jump(libc::BPF_JEQ, number, behind as u8, 0));
        }
        filter.push(statement(libc::BPF_JMP | libc::BPF_JA, group.len() as u32));
        filter.extend(group);
    }
    filter.push(allow);
    filter
}

/// Returns a filter that answers `EBADF` to calls that close or replace one of `descriptors`.
/// `close_range` goes by `descriptors.rs`: programs that this one starts use it on all numbers.
fn refuse_to_close(descriptors: Range<u32>) -> Vec<sock_filter> {
    let argument = |at: usize| load(mem::offset_of!(libc::seccomp_data, args) + 8 * at);
    let ours = [
        jump(libc::BPF_JGE, descriptors.start, 0, 2),
        jump(libc::BPF_JGE, descriptors.end, 1, 0),
        answer(libc::SECCOMP_RET_ERRNO | libc::EBADF as u32),
    ];
    let mut filter = vec![
        load(mem::offset_of!(libc::seccomp_data, nr)),
        jump(libc::BPF_JEQ, libc::SYS_close as u32, 4, 0),
        #[cfg(target_arch = "x86_64")]
        jump(libc::BPF_JEQ, libc::SYS_dup2 as u32, 1, 0),
        #[cfg(not(target_arch = "x86_64"))]
        jump(libc::BPF_JEQ, libc::SYS_dup3 as u32, 1, 0),
        jump(libc::BPF_JEQ, libc::SYS_dup3 as u32, 0, 6),
        argument(1),
        statement(libc::BPF_JMP | libc::BPF_JA, 1),
        argument(0),
    ];
    filter.extend(ours);
    filter
}

/// Returns a filter that answers `EPERM` to `io_uring_setup`, as systems do that turn rings off:
/// programs then do without.
fn refuse_rings() -> [sock_filter; 3] {
    [
        load(mem::offset_of!(libc::seccomp_data, nr)),
        jump(libc::BPF_JEQ, libc::SYS_io_uring_setup as u32, 0, 1),
        answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ]
}

/// Compares: jumps over the next statement if one of `arguments` is in `windows`.
fn compare(windows: Range<usize>, arguments: u8) -> Vec<sock_filter> {
    compare_each(arguments, |_, upper| {
        vec![
            upper,
            jump(libc::BPF_JGE, windows.start as u32, 0, 1),
            jump(libc::BPF_JGE, windows.end as u32, 0, FOUND),
        ]
    })
}

/// Part of static arrays in one window: its upper half, and its first and last lower half.
type Piece = (u32, u32, u32);

/// Returns the pieces of `addresses`.
fn pieces(addresses: &Range<usize>) -> Vec<Piece> {
    let last = addresses.end - 1;
    let windows = addresses.start >> WINDOW_BITS..=last >> WINDOW_BITS;
    let piece = |window: usize| {
        let start = addresses.start.max(window << WINDOW_BITS);
        let last = last.min((window << WINDOW_BITS) + ((1 << WINDOW_BITS) - 1));
        (window as u32, start as u32, last as u32)
    };
    windows.map(piece).collect()
}

/// Compares as [`compare`] does, with all bits of addresses: the program's own memory is near.
fn compare_pieces(pieces: &[Piece], arguments: u8) -> Vec<sock_filter> {
    compare_each(arguments, |lower, upper| is_in(pieces, lower, upper))
}

/// Returns comparisons with `pieces` of what `lower` and `upper` load.
fn is_in(pieces: &[Piece], lower: sock_filter, upper: sock_filter) -> Vec<sock_filter> {
    let of_piece = |&(window, first, last): &Piece| {
        [
            upper,
            jump(libc::BPF_JEQ, window, 0, 3),
            lower,
            jump(libc::BPF_JGE, first, 0, 1),
            jump(libc::BPF_JGT, last, 0, FOUND),
        ]
    };
    pieces.iter().flat_map(of_piece).collect()
}

/// Mark of a jump to behind the statement that follows comparisons.
const FOUND: u8 = u8::MAX;

/// Joins `comparison`s of the lower and upper half of each of `arguments`.
fn compare_each(
    arguments: u8,
    comparison: impl Fn(sock_filter, sock_filter) -> Vec<sock_filter>,
) -> Vec<sock_filter> {
    let data = mem::offset_of!(libc::seccomp_data, args);
    let arguments = (0..6).filter(|at| arguments >> at & 1 == 1);
    let each = arguments.map(|at| comparison(load(data + 8 * at), load(data + 8 * at + 4)));
    joined(each.flatten().collect())
}

/// Sets the jumps with the mark [`FOUND`].
fn joined(mut comparisons: Vec<sock_filter>) -> Vec<sock_filter> {
    let statements = comparisons.len();
    for (at, statement) in comparisons.iter_mut().enumerate() {
        if statement.jf == FOUND {
            statement.jf = u8::try_from(statements - at).expect("a filter has few pieces");
        }
    }
    comparisons
}

/// Raises SIGSYS if a call comes from `code`, unless it comes from [`calls::system_call`]. Programs
/// that this process becomes by `exec` have that code elsewhere, whatever they have at the
/// addresses of its arrays.
fn from_code(code: &[Range<usize>]) -> Vec<sock_filter> {
    let pointer = mem::offset_of!(libc::seccomp_data, instruction_pointer);
    let pieces: Vec<_> = code.iter().flat_map(pieces).collect();
    let mut filter = joined(is_in(&pieces, load(pointer), load(pointer + 4)));
    filter.push(answer(libc::SECCOMP_RET_ALLOW));
    filter.extend(unless_ours());
    filter
}

/// Raises SIGSYS, unless the call comes from [`calls::system_call`].
fn unless_ours() -> [sock_filter; 6] {
    let from = calls::instruction() + calls::INSTRUCTION_BYTES;
    let pointer = mem::offset_of!(libc::seccomp_data, instruction_pointer);
    [
        load(pointer),
        jump(libc::BPF_JEQ, from as u32, 0, 2),
        load(pointer + 4),
        jump(libc::BPF_JEQ, (from >> WINDOW_BITS) as u32, 1, 0),
        answer(libc::SECCOMP_RET_TRAP),
        answer(libc::SECCOMP_RET_ALLOW),
    ]
}

fn handle_sigsys() -> Result<(), String> {
    // SAFETY: all zeros is a valid action.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = on_sigsys as *const () as usize;
    // Other signals need not wait: the call may take long.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_RESTART;
    match signals::install(libc::SIGSYS, &action) {
        0 => Ok(()),
        _ => Err(no_sigsys()),
    }
}

/// Makes the call that the kernel has not made.
#[cfg(target_arch = "x86_64")]
extern "C-unwind" fn on_sigsys(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    const SYS_SECCOMP: c_int = 1;
    let before = errno();
    let user = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel's, valid while the handler runs and nobody else's.
    let (code, registers) = unsafe { ((*info).si_code, &mut (*user).uc_mcontext.gregs) };
    let register = |which: c_int| registers[which as usize] as usize;
    let args = [
        register(libc::REG_RDI),
        register(libc::REG_RSI),
        register(libc::REG_RDX),
        register(libc::REG_R10),
        register(libc::REG_R8),
        register(libc::REG_R9),
    ];
    // The program may have a filter of its own.
    if code != SYS_SECCOMP || !args.iter().any(|&at| is_in_window(at) || is_remote(at, 1)) {
        signals::pass_on_sigsys(signal, info, context);
        return;
    }
    let number = registers[libc::REG_RAX as usize];
    // SAFETY: the program's own call, or one of the runtime's, which gives the kernel no remote
    // memory.
    let result = unsafe {
        if Inside::is() {
            calls::system_call(number, args)
        } else {
            guesses::call(number, args)
        }
    };
    registers[libc::REG_RAX as usize] = result as libc::greg_t;
    if number == libc::SYS_rt_sigprocmask || number == libc::SYS_sigaltstack {
        keep(user);
    }
    set_errno(before);
}

#[cfg(not(target_arch = "x86_64"))]
extern "C-unwind" fn on_sigsys(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    signals::pass_on_sigsys(signal, info, context);
}

/// Keeps the changes of these calls, which the return from a handler would undo. The context may
/// lie in remote memory, if the thread's stack does.
#[cfg(target_arch = "x86_64")]
fn keep(user: *mut libc::ucontext_t) {
    // SAFETY: the context is the kernel's, of whose set of signals 8 bytes are there.
    let (held, stack) = unsafe { (&raw mut (*user).uc_sigmask, &raw mut (*user).uc_stack) };
    let held_at = held.addr();
    let mask = [libc::SIG_BLOCK as usize, 0, held_at, 8, 0, 0];
    tell(libc::SYS_rt_sigprocmask, mask, held.cast());
    let alternate = [0, stack.addr(), 0, 0, 0, 0];
    tell(libc::SYS_sigaltstack, alternate, stack.cast());
}

/// Makes a call that writes to `to`, as often as the page there has left meanwhile.
#[cfg(target_arch = "x86_64")]
fn tell(number: libc::c_long, args: [usize; 6], to: *mut u8) {
    // SAFETY: the call writes to the context alone, of which one byte is written as it is.
    while unsafe { calls::system_call(number, args) } == -(libc::EFAULT as isize) {
        // SAFETY: as above.
        unsafe { to.write_volatile(to.read_volatile()) };
    }
}
