//! Codes, the message of the last error, and the wall that no panic passes.

use std::{
    any::Any,
    cell::RefCell,
    error::Error,
    ffi::{CString, c_char},
    io::ErrorKind,
    panic::{AssertUnwindSafe, catch_unwind},
};

use farpage::{
    BuildError, CreateError, FlushError, OpenError, PageError, PinError,
    error::{ControlError, MapError, NamesError, OpenStoreError, PublishError, StoreCreateError},
};

/// Result of a function: `FARPAGE_OK`, or one of the codes below, with a message from
/// `farpage_error_message`.
pub type farpage_code = i32;

/// Success.
pub const FARPAGE_OK: farpage_code = 0;
/// An argument or an option makes no sense; nothing was done.
pub const FARPAGE_INVALID: farpage_code = 1;
/// The process may not handle its own page faults, or not use the file in this way; the message
/// says how to mend it.
pub const FARPAGE_DENIED: farpage_code = 2;
/// A memory server cannot be reached.
pub const FARPAGE_UNREACHABLE: farpage_code = 3;
/// Shortage: no remote memory, no addresses, or more pinned than the budget allows.
pub const FARPAGE_NO_MEMORY: farpage_code = 4;
/// Unknown name: no server has a region of that name.
pub const FARPAGE_NOT_FOUND: farpage_code = 5;
/// Pages could not be brought in or written back. Changes are still in memory, unless the message
/// says that a page's newest bytes are lost: then `farpage_region_overwrite` brings the page back.
pub const FARPAGE_PAGES: farpage_code = 6;
/// The process is a child of the one that made the runtime: it can read and write copies of the
/// regions, and nothing more.
pub const FARPAGE_FORKED: farpage_code = 7;
/// The operating system refused.
pub const FARPAGE_SYSTEM: farpage_code = 8;
/// A bug in farpage; the message is worth a report.
pub const FARPAGE_INTERNAL: farpage_code = 9;
/// A region of that name exists already: open it, remove it, or set `replace`.
pub const FARPAGE_EXISTS: farpage_code = 10;
/// A region of that name is open, here or in another program, until it is closed there.
pub const FARPAGE_IN_USE: farpage_code = 11;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Returns the message of the last function of farpage that failed in this thread: the cause and
/// the remedy. Never null; empty if no function has failed.
///
/// The text belongs to farpage and does not change until the next function fails in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn farpage_error_message() -> *const c_char {
    LAST.with_borrow(|text| text.as_ptr())
}

/// A code with its message.
#[derive(Debug)]
pub(crate) struct Failure {
    code: farpage_code,
    message: String,
}

impl Failure {
    pub(crate) fn new(code: farpage_code, message: impl Into<String>) -> Failure {
        Failure {
            code,
            message: message.into(),
        }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Failure {
        Failure::new(FARPAGE_INVALID, message)
    }

    fn of(code: farpage_code, error: &dyn Error) -> Failure {
        Failure::new(code, error.to_string())
    }
}

/// Runs the body of a function. Its failure, or its panic, becomes a code and a message.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> farpage_code {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return FARPAGE_OK,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::new(FARPAGE_INTERNAL, panic_text(panic.as_ref())),
    };
    let text = CString::new(failure.message.replace('\0', "\\0"))
        .expect("zero bytes were replaced just now");
    LAST.set(text);
    failure.code
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("a panic without a message")
        .to_owned()
}

impl From<BuildError> for Failure {
    fn from(error: BuildError) -> Failure {
        let code = match &error {
            BuildError::Option(_) | BuildError::Endpoint(_) => FARPAGE_INVALID,
            BuildError::Connect(_) => FARPAGE_UNREACHABLE,
            BuildError::Userfaultfd(_) => FARPAGE_DENIED,
            BuildError::Start(farpage::error::StartError::Option(_)) => FARPAGE_INVALID,
            _ => FARPAGE_SYSTEM,
        };
        Failure::of(code, &error)
    }
}

impl From<CreateError> for Failure {
    fn from(error: CreateError) -> Failure {
        let code = match &error {
            CreateError::Store(StoreCreateError::Alloc { .. } | StoreCreateError::Table(_))
            | CreateError::TooLarge { .. } => FARPAGE_NO_MEMORY,
            CreateError::Store(StoreCreateError::Size { bytes: 1.., .. }) => FARPAGE_NO_MEMORY,
            CreateError::Store(StoreCreateError::Claim(PublishError::Exists { .. })) => {
                FARPAGE_EXISTS
            }
            CreateError::Store(StoreCreateError::InUse { .. } | StoreCreateError::Held { .. }) => {
                FARPAGE_IN_USE
            }
            CreateError::Store(StoreCreateError::Claim(
                PublishError::NotAsked(_)
                | PublishError::Control(ControlError::Disconnected { .. }),
            )) => FARPAGE_UNREACHABLE,
            CreateError::Store(StoreCreateError::Repairs { .. }) => FARPAGE_SYSTEM,
            CreateError::Store(_) | CreateError::Name(_) => FARPAGE_INVALID,
            CreateError::Map(error) => map_code(error),
            _ => FARPAGE_SYSTEM,
        };
        match error {
            // Advice in words of C.
            CreateError::Store(error @ StoreCreateError::Alloc { .. }) => Failure::new(
                code,
                format!(
                    "{error}, or let the region take what its pages turn out to need (`on_demand`)"
                ),
            ),
            error => Failure::of(code, &error),
        }
    }
}

fn map_code(error: &MapError) -> farpage_code {
    match error {
        MapError::Budget { .. } => FARPAGE_INVALID,
        MapError::Os { source, .. } => match source.kind() {
            ErrorKind::OutOfMemory => FARPAGE_NO_MEMORY,
            ErrorKind::InvalidInput | ErrorKind::AlreadyExists => FARPAGE_INVALID,
            _ => FARPAGE_SYSTEM,
        },
        _ => FARPAGE_SYSTEM,
    }
}

impl From<NamesError> for Failure {
    fn from(error: NamesError) -> Failure {
        let code = match &error {
            NamesError::NotFound { .. } => FARPAGE_NOT_FOUND,
            NamesError::InUse { .. } | NamesError::Held { .. } => FARPAGE_IN_USE,
            NamesError::List(ControlError::Disconnected { .. }) => FARPAGE_UNREACHABLE,
            _ => FARPAGE_INVALID,
        };
        Failure::of(code, &error)
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Failure {
        let code = match &error {
            OpenError::Store(OpenStoreError::NotFound { .. }) => FARPAGE_NOT_FOUND,
            OpenError::Store(OpenStoreError::InUse { .. } | OpenStoreError::Held { .. }) => {
                FARPAGE_IN_USE
            }
            OpenError::Store(OpenStoreError::Alloc { .. } | OpenStoreError::Table(_)) => {
                FARPAGE_NO_MEMORY
            }
            OpenError::Store(OpenStoreError::Connect { .. }) => FARPAGE_UNREACHABLE,
            OpenError::Map(error) => map_code(error),
            _ => FARPAGE_INVALID,
        };
        Failure::of(code, &error)
    }
}

impl From<FlushError> for Failure {
    fn from(error: FlushError) -> Failure {
        Failure::of(FARPAGE_PAGES, &error)
    }
}

impl From<PageError> for Failure {
    fn from(error: PageError) -> Failure {
        Failure::of(FARPAGE_PAGES, &error)
    }
}

impl From<PinError> for Failure {
    fn from(error: PinError) -> Failure {
        let code = match &error {
            PinError::Budget { .. } => FARPAGE_NO_MEMORY,
            PinError::TooOften { .. } => FARPAGE_INVALID,
            _ => FARPAGE_PAGES,
        };
        Failure::of(code, &error)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn message() -> String {
        // SAFETY: the text stays as it is, since nothing fails in this thread meanwhile.
        let text = unsafe { CStr::from_ptr(farpage_error_message()) };
        text.to_str().expect("errors are UTF-8").to_owned()
    }

    #[test]
    fn region_that_no_server_has_room_for_is_told_the_option_of_c() {
        let refused = ControlError::Refused {
            endpoint: "tcp://a:1".to_owned(),
            attempt: "lend memory".to_owned(),
            reason: "it is full".to_owned(),
        };
        let error = StoreCreateError::Alloc {
            region: "region 1 (4.0 GiB)".into(),
            bytes: 4 << 30,
            needed_bytes: 4 << 30,
            named: false,
            source: refused.into(),
        };
        let failure = Failure::from(CreateError::from(error));
        assert_eq!(failure.code, FARPAGE_NO_MEMORY);
        let said = failure.message;
        assert!(
            said.contains("`on_demand`") && !said.contains("Reserve"),
            "{said}"
        );
    }

    #[test]
    fn panic_becomes_a_code_and_its_text_a_message() {
        assert_eq!(guard(|| panic!("a {}", "bug")), FARPAGE_INTERNAL);
        assert_eq!(message(), "a bug");
        assert_eq!(guard(|| Ok(())), FARPAGE_OK);
        assert_eq!(message(), "a bug", "what worked leaves the message alone");
    }

    #[test]
    fn message_belongs_to_its_thread_and_may_hold_zero_bytes() {
        assert_eq!(guard(|| Err(Failure::invalid("a\0b"))), FARPAGE_INVALID);
        assert_eq!(message(), "a\\0b");
        std::thread::spawn(|| assert_eq!(message(), ""))
            .join()
            .expect("no message there");
    }
}
