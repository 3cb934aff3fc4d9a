//! Limits of serving a fault inside a signal handler ([`FaultHandler`]).

use crate::space::PageFault;

/// Bytes of stack that a [`FaultHandler`] has. Memory is taken as it is touched.
pub const STACK_BYTES: usize = 128 << 10;

/// Outcome of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The page may be there: the instruction is tried again.
    Retry,
    /// The page cannot be had. The signal goes to the handler that was there before, or kills the
    /// process.
    NotMine,
}

/// Handler of the faults in a range of addresses, run by the threads that raise them.
///
/// # Safety
/// [`fault`](Self::fault) runs inside a signal handler, at any instruction that touches the range,
/// on several threads at once:
/// - It allocates and frees little. The program's allocator serves it, whose lock the interrupted
///   code may hold, unless the program has [`Allocator`](farpage_signals::Allocator). It makes no
///   thread-local variable with a destructor (a contended `parking_lot` lock does): `malloc` serves
///   that in any case.
/// - It takes no lock under which a thread touches a range, or lets in signals whose handlers may:
///   not that of standard output or of a log.
/// - It reads a thread-local variable only if no other code changes it and it has no destructor.
/// - It touches no absent page of any registered range: that kills the process.
/// - It does not end a [`FaultRegistration`](super::FaultRegistration).
///
/// It may call the operating system (`errno` is put back) and use [`STACK_BYTES`] of stack. A panic
/// aborts the process.
pub unsafe trait FaultHandler: Send + Sync {
    /// Serves the fault, or waits until another thread has.
    fn fault(&self, fault: PageFault) -> Served;
}
