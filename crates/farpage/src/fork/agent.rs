//! Agent: a thread that moves pages out of the regions of a process made by `fork`, as the keeper
//! in the parent tells it to.
//!
//! 1. Before any other code of the child runs, [`expect_call`] installs a handler of SIGURG, unless
//!    the program has one. That is all that a child pays that calls `exec`.
//! 2. The keeper [calls](super::call) once the child has brought much in: the handler starts
//!    the thread. It has a stack and a table of descriptors of its own, and connects to the keeper.
//! 3. For each [`Command`] the thread moves pages to its scratch by `UFFDIO_MOVE`: a page leaves
//!    whole, with all that was written to it until then. The [`Report`] says which have moved. The
//!    keeper reads them there, and the next command frees the scratch.
//!
//! The rules it keeps:
//! - The thread has no thread-local memory. So it makes system calls by [`system_call`] alone, and
//!   never panics.
//! - The program may give up rights that the thread still has. So the thread has no descriptors but
//!   its own two, and [limits](limit) itself to the calls of its loop.
//!
//! Other processors than x86-64 have [no agent](super::agent): their children keep what they touch.

use std::{
    cell::UnsafeCell,
    ffi::{c_int, c_void},
    mem, ptr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use farpage_vm::{FUTEX_ADD_NOTHING, calls::system_call};

use super::{
    link::{Kind, LinkName, Parcel},
    orders::{AGENT_NAME, Command, KERNEL_PAGE, LOOK, LOOK_BYTES, Report, SCRATCH_BYTES},
};

/// Number of keepers that can call one process.
const KEEPERS_MAX: usize = 8;
/// Bytes of the thread's stack, with its [`Desk`] at the lower end.
const STACK_BYTES: usize = 128 << 10;
/// System calls that the thread makes in its loop, and at its end.
const CALLS: [libc::c_long; 8] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_pread64,
    libc::SYS_ioctl,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_exit,
];
/// Statements of the filter that allows [`CALLS`] alone.
const FILTER: [libc::sock_filter; CALLS.len() + 3] = filter();
/// Bytes of the kernel's signal set.
const SET_BYTES: usize = 8;
/// Number of tries to move a page that the kernel has locked.
const TRIES_MAX: u32 = 64;

// Numbers of the kernel's that the `libc` crate lacks.
const SA_RESTORER: u64 = 0x0400_0000;
const CLOSE_RANGE_UNSHARE: usize = 2;
/// `MADV_DONTNEED_LOCKED`: the program may have locked all of its memory.
const DONTNEED_LOCKED: usize = 24;
const USER_MODE_ONLY: usize = 1;
const UFFDIO_API: usize = 0xc018_aa3f;
const UFFDIO_REGISTER: usize = 0xc020_aa00;
const UFFDIO_MOVE: usize = 0xc028_aa05;
const API: u64 = 0xaa;
const FEATURE_MOVE: u64 = 1 << 16;
const REGISTER_MISSING: u64 = 1;
const DONT_WAKE: u64 = 1;

/// A keeper that may call.
struct Caller {
    /// Number by which the keeper knows this process; 0 for none. Stored after `name`.
    number: AtomicU64,
    name: UnsafeCell<Option<LinkName>>,
    is_started: AtomicBool,
}

// SAFETY: `name` is written while the process has one thread and no signals, before `number`.
unsafe impl Sync for Caller {}

static CALLERS: [Caller; KEEPERS_MAX] = [const {
    Caller {
        number: AtomicU64::new(0),
        name: UnsafeCell::new(None),
        is_started: AtomicBool::new(false),
    }
}; KEEPERS_MAX];

/// Action of a signal, as the kernel has it.
#[repr(C)]
struct KernelAction {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// Memory that the thread works with: its first fields are given to it.
#[repr(C)]
struct Desk {
    name: LinkName,
    number: u64,
    nobody: u32,
    command: Command,
    report: Report,
    /// Words of the kernel's page map.
    page_map: [u64; LOOK_BYTES / KERNEL_PAGE],
}

/// Forgets the keepers that the parent of this process expects calls of.
pub(super) fn forget_calls() {
    for caller in &CALLERS {
        caller.number.store(0, Ordering::Relaxed);
    }
}

/// Prepares this process, which `fork` has just made, to start an agent for the keeper of this
/// name. Returns the kind of the message that tells the keeper: [`Kind::Deaf`] if it cannot call.
pub(super) fn expect_call(number: u64, name: &LinkName) -> Kind {
    let mut callers = CALLERS.iter();
    let free = callers.find(|caller| caller.number.load(Ordering::Relaxed) == 0);
    let Some(caller) = free.filter(|_| install()) else {
        return Kind::Deaf;
    };
    // SAFETY: this thread is the only one, and the handler finds no number.
    unsafe { *caller.name.get() = Some(*name) };
    caller.is_started.store(false, Ordering::Relaxed);
    caller.number.store(number, Ordering::Release);
    Kind::Armed
}

/// Installs the handler. Returns false, with all as before, if the program has one.
fn install() -> bool {
    let ours = on_call as *const () as usize;
    let action = KernelAction {
        handler: ours,
        flags: (libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK) as u64 | SA_RESTORER,
        restorer: return_from_handler as *const () as usize,
        mask: 0,
    };
    let mut before = KernelAction {
        handler: 0,
        flags: 0,
        restorer: 0,
        mask: 0,
    };
    let exchange = |new: &KernelAction, old: *mut KernelAction| {
        let new = ptr::from_ref(new).addr();
        let args = [libc::SIGURG as usize, new, old.addr(), SET_BYTES, 0, 0];
        // SAFETY: actions as the kernel has them. SIGURG is ignored by default.
        unsafe { system_call(libc::SYS_rt_sigaction, args) }
    };
    if exchange(&action, &raw mut before) != 0 {
        return false;
    }
    if [libc::SIG_DFL, libc::SIG_IGN, ours].contains(&before.handler) {
        return true;
    }
    exchange(&before, ptr::null_mut());
    false
}

/// Returns from a handler, as the C library's code does that the kernel calls.
#[unsafe(naked)]
extern "C" fn return_from_handler() {
    std::arch::naked_asm!("mov eax, 15", "syscall");
}

/// Starts the agent that the keeper has called for.
extern "C" fn on_call(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel's, valid while the handler runs. A queued signal has a value.
    let (code, value) = unsafe { ((*info).si_code, (*info).si_value().sival_ptr.addr()) };
    if code != libc::SI_QUEUE || value == 0 {
        return;
    }
    let mut callers = CALLERS.iter();
    let caller = callers.find(|it| it.number.load(Ordering::Acquire) == value as u64);
    let Some(caller) = caller else { return };
    if !caller.is_started.swap(true, Ordering::Relaxed) {
        // SAFETY: written before the number.
        if let Some(name) = unsafe { &*caller.name.get() } {
            start(name, value as u64);
        }
    }
}

/// Maps memory of `bytes` bytes that no child of this process gets. `None`: there is none.
fn map(bytes: usize) -> Option<usize> {
    let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let kind = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as usize;
    // SAFETY: maps where nothing is.
    let made = unsafe { system_call(libc::SYS_mmap, [0, bytes, access, kind, !0, 0]) };
    if !(0..isize::MAX).contains(&made) {
        return None;
    }
    for advice in [libc::MADV_DONTFORK, libc::MADV_NOHUGEPAGE] {
        // SAFETY: made just now.
        unsafe {
            system_call(
                libc::SYS_madvise,
                [made as usize, bytes, advice as usize, 0, 0, 0],
            )
        };
    }
    Some(made as usize)
}

/// Starts the thread, to which no signal comes.
fn start(name: &LinkName, number: u64) {
    let Some(memory) = map(STACK_BYTES) else {
        return;
    };
    let desk = ptr::with_exposed_provenance_mut::<Desk>(memory);
    let (all, mut before) = (!0_u64, 0_u64);
    let mask = |new: *const u64, old: *mut u64| {
        let how = libc::SIG_SETMASK as usize;
        let args = [how, new.addr(), old.addr(), SET_BYTES, 0, 0];
        // SAFETY: sets of the kernel's size.
        unsafe { system_call(libc::SYS_rt_sigprocmask, args) }
    };
    // SAFETY:
    // - The memory was mapped just now, and is large enough for a desk and a stack above it.
    // - The new thread runs `work` on that stack, which never returns.
    unsafe {
        (&raw mut (*desk).name).write(*name);
        (&raw mut (*desk).number).write(number);
        mask(&raw const all, &raw mut before);
        clone(memory + STACK_BYTES, desk);
    }
    mask(&raw const before, ptr::null_mut());
}

/// Makes a thread that runs [`work`].
///
/// # Safety
/// `stack` is the upper end of memory that nobody else uses.
unsafe fn clone(stack: usize, desk: *mut Desk) {
    let flags = libc::CLONE_VM
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM;
    // SAFETY: this function's contract. Registers of the new thread are those of this one.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r8",
            "call r9",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone => _,
            in("rdi") flags as usize,
            in("rsi") stack,
            in("rdx") 0_usize,
            in("r10") 0_usize,
            in("r8") desk,
            in("r9") work as extern "C" fn(*mut Desk) -> !,
            out("rcx") _,
            out("r11") _,
        );
    }
}

/// Makes a system call of the agent's. A negative result is the number of an error.
///
/// # Safety
/// As [`system_call`].
unsafe fn ask(number: libc::c_long, args: &[usize]) -> isize {
    let mut all = [0_usize; 6];
    for (to, from) in all.iter_mut().zip(args) {
        *to = *from;
    }
    // SAFETY: this function's contract.
    unsafe { system_call(number, all) }
}

/// Runs the agent.
extern "C" fn work(desk: *mut Desk) -> ! {
    // SAFETY: the desk is this thread's own, and lasts as long as the process.
    unsafe { serve(desk) };
    loop {
        // SAFETY: ends this thread alone.
        unsafe { ask(libc::SYS_exit, &[0]) };
    }
}

/// Serves the keeper until the connection ends. Returns at once where something is refused:
/// the keeper waits for the agent no longer than a second.
///
/// # Safety
/// For the thread that the desk belongs to.
unsafe fn serve(desk: *mut Desk) -> Option<()> {
    let made = |result: isize| usize::try_from(result).ok();
    // SAFETY:
    // - Descriptors are in a table of this thread's own from the first call on.
    // - Memory that calls write to is the desk, the stack or the scratch, of this thread.
    unsafe {
        // Without a table of its own the thread would work on descriptors of the program's.
        made(ask(
            libc::SYS_close_range,
            &[0, u32::MAX as usize, CLOSE_RANGE_UNSHARE],
        ))?;
        let name = AGENT_NAME.as_ptr().addr();
        ask(libc::SYS_prctl, &[libc::PR_SET_NAME as usize, name]);
        let kind = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as usize;
        let socket = ask(libc::SYS_socket, &[libc::AF_UNIX as usize, kind, 0]);
        let socket = made(socket)?;
        let name = &(*desk).name;
        let to = [socket, name.as_ptr().addr(), name.len() as usize];
        made(ask(libc::SYS_connect, &to))?;
        let (uffd, scratch) = scratch()?;
        let parcel = Parcel::new(Kind::Agent, (*desk).number);
        let hello = [socket, (&raw const parcel).addr(), mem::size_of::<Parcel>()];
        made(ask(libc::SYS_write, &hello))?;
        let path = c"/proc/self/pagemap".as_ptr().addr();
        let page_map = ask(libc::SYS_open, &[path, libc::O_RDONLY as usize]);
        limit()?;
        (*desk).report[0] = scratch as u64;
        let (command, report) = (&raw mut (*desk).command, &raw mut (*desk).report);
        loop {
            let said = [socket, report.addr(), mem::size_of::<Report>()];
            made(ask(libc::SYS_write, &said))?;
            let heard = [socket, command.addr(), mem::size_of::<Command>()];
            let got = made(ask(libc::SYS_read, &heard))?;
            if got != mem::size_of::<Command>() {
                return None;
            }
            let free = [scratch, SCRATCH_BYTES, DONTNEED_LOCKED];
            let is_free = ask(libc::SYS_madvise, &free) == 0;
            match (*desk).command[0] {
                LOOK => look(desk, page_map),
                _ if is_free => move_out(desk, uffd, scratch),
                // Reports that no page has moved.
                _ => clear(&mut *report),
            }
        }
    }
}

/// Makes the scratch, and a descriptor that pages are moved to it by. `None` where the kernel
/// refuses one.
fn scratch() -> Option<(usize, usize)> {
    let made = |result: isize| usize::try_from(result).ok();
    let flags = libc::O_CLOEXEC as usize | USER_MODE_ONLY;
    let mut api = [API, FEATURE_MOVE, 0];
    // SAFETY: memory that calls write to is on the stack.
    unsafe {
        let uffd = made(ask(libc::SYS_userfaultfd, &[flags]))?;
        let args = [uffd, UFFDIO_API, (&raw mut api).addr()];
        made(ask(libc::SYS_ioctl, &args))?;
        let scratch = map(SCRATCH_BYTES)?;
        let mut range = [scratch as u64, SCRATCH_BYTES as u64, REGISTER_MISSING, 0];
        let args = [uffd, UFFDIO_REGISTER, (&raw mut range).addr()];
        made(ask(libc::SYS_ioctl, &args))?;
        Some((uffd, scratch))
    }
}

/// Returns the statements of [`FILTER`]: the end of the filter for all calls but those, which jump
/// over it.
const fn filter() -> [libc::sock_filter; CALLS.len() + 3] {
    const fn statement(code: u32, k: u32, jt: u8) -> libc::sock_filter {
        let code = code as u16;
        libc::sock_filter { code, jt, jf: 0, k }
    }
    let answer = libc::BPF_RET | libc::BPF_K;
    let number = mem::offset_of!(libc::seccomp_data, nr) as u32;
    let load = statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, number, 0);
    let mut filter = [load; CALLS.len() + 3];
    let mut at = 0;
    while at < CALLS.len() {
        let behind = (CALLS.len() - at) as u8;
        let test = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        filter[1 + at] = statement(test, CALLS[at] as u32, behind);
        at += 1;
    }
    let refusal = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    filter[1 + CALLS.len()] = statement(answer, refusal, 0);
    filter[2 + CALLS.len()] = statement(answer, libc::SECCOMP_RET_ALLOW, 0);
    filter
}

/// Limits this thread to [`CALLS`] from now on. `None`: that is refused.
fn limit() -> Option<()> {
    let program = libc::sock_fprog {
        len: FILTER.len() as u16,
        filter: FILTER.as_ptr().cast_mut(),
    };
    let set = libc::SECCOMP_SET_MODE_FILTER as usize;
    // SAFETY: both change this thread alone; the filter lasts for the call.
    unsafe {
        ask(
            libc::SYS_prctl,
            &[libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0],
        );
        let limited = ask(libc::SYS_seccomp, &[set, 0, (&raw const program).addr()]);
        (limited == 0).then_some(())
    }
}

/// Looks for pages at the command's addresses. Reports none where the kernel does not tell.
///
/// # Safety
/// As [`serve`].
unsafe fn look(desk: *mut Desk, page_map: isize) {
    /// Flags of the kernel's page map.
    const PRESENT: u64 = 1 << 63;
    const EXCLUSIVE: u64 = 1 << 56;
    // SAFETY: the desk is this thread's own.
    let (command, report) = unsafe { (&(*desk).command, &mut (*desk).report) };
    // SAFETY: as above.
    let words = unsafe { &mut (*desk).page_map };
    let (_, bits) = report.split_at_mut(1);
    bits.iter_mut().for_each(|word| *word = 0);
    let (len, start) = (command[1] as usize, command[2] as usize);
    let offset = start / KERNEL_PAGE * size_of::<u64>();
    let bytes = len.min(LOOK_BYTES) / KERNEL_PAGE * size_of::<u64>();
    let room = words.as_mut_ptr().addr();
    // SAFETY: there is room for the words.
    let read = unsafe {
        ask(
            libc::SYS_pread64,
            &[page_map.cast_unsigned(), room, bytes, offset],
        )
    };
    let count = read.max(0) as usize / size_of::<u64>();
    for (page, &word) in words.iter().enumerate().take(count) {
        if word & PRESENT == 0 {
            continue;
        }
        let (at, bit) = match word & EXCLUSIVE {
            0 => (0, 0),
            _ => (1 + page / 64, page % 64),
        };
        if let Some(bits) = bits.get_mut(at) {
            *bits = if at == 0 { *bits + 1 } else { *bits | 1 << bit };
        }
    }
}

/// Clears the bits of a report.
fn clear(report: &mut Report) {
    let (_, bits) = report.split_at_mut(2);
    bits.iter_mut().for_each(|word| *word = 0);
}

/// Moves the pages of the command, and notes the kernel pages that have moved.
///
/// # Safety
/// As [`serve`].
unsafe fn move_out(desk: *mut Desk, uffd: usize, scratch: usize) {
    // SAFETY: the desk is this thread's own.
    let (command, report) = unsafe { (&(*desk).command, &mut (*desk).report) };
    clear(report);
    let (_, moved) = report.split_at_mut(2);
    let (count, page_bytes) = (command[0] as usize, command[1] as usize);
    let mut to = 0;
    for &address in command.iter().skip(2).take(count) {
        let address = address as usize;
        let (mut at, mut step, mut tries, mut is_own) = (0, page_bytes, 0, false);
        while at < page_bytes && to + page_bytes <= SCRATCH_BYTES {
            let len = step.min(page_bytes - at);
            let (dst, src) = (scratch + to + at, address + at);
            let mut arg = [dst as u64, src as u64, len as u64, DONT_WAKE, 0];
            let args = [uffd, UFFDIO_MOVE, (&raw mut arg).addr()];
            // SAFETY: the keeper brings the bytes back to whoever touches the page.
            let result = unsafe { ask(libc::SYS_ioctl, &args) };
            let done = match -result as c_int {
                0 => len,
                // From Linux 6.18 on, a move that has to try again inside the kernel (a page ages
                // or migrates at that moment) forgets that it succeeded, tries once more, and meets
                // the pages that it has just moved. The scratch was empty before the command: what
                // is there has moved. The number of moved pages is not told: the next one answers
                // for itself.
                libc::EEXIST => KERNEL_PAGE,
                _ => arg[4].cast_signed().max(0) as usize,
            };
            if done > 0 {
                for page in (to + at) / KERNEL_PAGE..(to + at + done) / KERNEL_PAGE {
                    if let Some(word) = moved.get_mut(page / 64) {
                        *word |= 1 << (page % 64);
                    }
                }
                (at, tries, is_own) = (at + done, 0, false);
                continue;
            }
            match -result as c_int {
                libc::EAGAIN if tries < TRIES_MAX => {
                    tries += 1;
                    // SAFETY: changes nothing.
                    unsafe { ask(libc::SYS_sched_yield, &[]) };
                }
                // Shared with another process: a write makes the page this one's own. The
                // kernel waits for no fault of an absent page in this call.
                libc::EBUSY if !is_own => {
                    is_own = true;
                    let call = (libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG) as usize;
                    // SAFETY: the desk is this thread's own.
                    let nobody = unsafe { (&raw const (*desk).nobody).addr() };
                    let args = [nobody, call, 0, 0, src, FUTEX_ADD_NOTHING];
                    // SAFETY: wakes nobody, and changes no byte.
                    unsafe { ask(libc::SYS_futex, &args) };
                }
                _ if step > KERNEL_PAGE => step = KERNEL_PAGE,
                _ => (at, tries, is_own) = (at + KERNEL_PAGE, 0, false),
            }
        }
        to += page_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::orders::{EMPTY_REPORT, command, has_bit},
        *,
    };

    /// Kernel pages of one page.
    const PARTS: usize = 4;

    /// Moves one kernel page to the scratch as the kernel does that does not tell of it.
    fn move_untold(uffd: usize, to: usize, from: usize) {
        let mut arg = [to as u64, from as u64, KERNEL_PAGE as u64, DONT_WAKE, 0];
        // SAFETY: memory of the test's own.
        let moved = unsafe { ask(libc::SYS_ioctl, &[uffd, UFFDIO_MOVE, (&raw mut arg).addr()]) };
        assert_eq!(moved, 0, "the page moves");
    }

    #[test]
    fn pages_that_the_kernel_moves_and_calls_refused_are_reported_as_moved() {
        let Some((uffd, scratch)) = scratch() else {
            eprintln!("SKIPPED: the kernel moves no pages: it takes Linux 6.8 and userfaultfd");
            return;
        };
        let page = map(PARTS * KERNEL_PAGE).expect("there is memory");
        let desk = map(STACK_BYTES).expect("there is memory");
        let desk = ptr::with_exposed_provenance_mut::<Desk>(desk);
        for untold in 1..1 << PARTS {
            let words = |start: usize| {
                (0..PARTS).map(move |part| {
                    ptr::with_exposed_provenance_mut::<u64>(start + part * KERNEL_PAGE)
                })
            };
            let free = [scratch, SCRATCH_BYTES, libc::MADV_DONTNEED as usize];
            // SAFETY: memory of the test's own, which only this thread uses.
            let report = unsafe {
                assert_eq!(ask(libc::SYS_madvise, &free), 0, "the scratch is free");
                (words(page).enumerate()).for_each(|(part, word)| word.write(1 + part as u64));
                for offset in (0..PARTS).filter(|part| untold >> part & 1 == 1) {
                    let offset = offset * KERNEL_PAGE;
                    move_untold(uffd, scratch + offset, page + offset);
                }
                (*desk).report = EMPTY_REPORT;
                (*desk).command = command(&[page], PARTS * KERNEL_PAGE);
                move_out(desk, uffd, scratch);
                (*desk).report
            };
            let is_told = (0..PARTS).all(|part| has_bit(&report, part * KERNEL_PAGE));
            assert!(is_told, "all parts have moved, {untold:#b} of them untold");
            // SAFETY: all parts of the page are there.
            let there = words(scratch).map(|word| unsafe { word.read() });
            assert!(there.eq(1..=PARTS as u64), "the parts are whole");
        }
    }
}
