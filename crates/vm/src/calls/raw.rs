//! One instruction that enters the kernel ([`system_call`]), at an address that is known.
//!
//! A filter that stops system calls (seccomp) lets those at [`instruction`] pass.

/// The arguments of a system call.
pub type Arguments = [usize; 6];

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .text.farpage_system_call,\"ax\",@progbits",
    ".hidden farpage_system_call",
    ".globl farpage_system_call",
    ".type farpage_system_call,@function",
    "farpage_system_call:",
    ".cfi_startproc",
    "mov rax, rdi",
    "mov r11, rsi",
    "mov rdi, [r11]",
    "mov rsi, [r11 + 8]",
    "mov rdx, [r11 + 16]",
    "mov r10, [r11 + 24]",
    "mov r8, [r11 + 32]",
    "mov r9, [r11 + 40]",
    ".hidden farpage_system_call_instruction",
    ".globl farpage_system_call_instruction",
    "farpage_system_call_instruction:",
    "syscall",
    "ret",
    ".cfi_endproc",
    ".size farpage_system_call, . - farpage_system_call",
    ".popsection",
);

#[cfg(target_arch = "x86_64")]
unsafe extern "C-unwind" {
    // A thread that is cancelled in the call unwinds from here.
    fn farpage_system_call(number: libc::c_long, args: *const usize) -> isize;
    fn farpage_system_call_instruction();
}

/// Length of the instruction that enters the kernel.
pub const INSTRUCTION_BYTES: usize = 2;

/// Returns the address of the instruction by which [`system_call`] enters the kernel; 0 if unknown.
pub fn instruction() -> usize {
    #[cfg(target_arch = "x86_64")]
    return farpage_system_call_instruction as *const () as usize;
    #[cfg(not(target_arch = "x86_64"))]
    return 0;
}

/// Enters the kernel. Returns the kernel's result: a negative number is that of an error.
///
/// # Safety
/// The call and its arguments are what the caller may ask of the kernel.
pub unsafe fn system_call(number: libc::c_long, args: Arguments) -> isize {
    // SAFETY: the caller's promise; the arguments are read before the call.
    #[cfg(target_arch = "x86_64")]
    return unsafe { farpage_system_call(number, args.as_ptr()) };
    #[cfg(not(target_arch = "x86_64"))]
    {
        let [a, b, c, d, e, f] = args;
        // SAFETY: the caller's promise.
        let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
        match result {
            -1 => -(nix::errno::Errno::last_raw() as isize),
            result => result as isize,
        }
    }
}
