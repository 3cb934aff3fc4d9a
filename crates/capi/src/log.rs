//! Messages of farpage's threads on standard error.

use tracing::Level;

use crate::error::{Failure, farpage_code, guard};

/// Level of operations that failed.
pub const FARPAGE_LOG_ERROR: u32 = 1;
/// Level that adds states that are not as they should be.
pub const FARPAGE_LOG_WARNING: u32 = 2;
/// Level that adds rare events.
pub const FARPAGE_LOG_INFO: u32 = 3;
/// Level that adds frequent events.
pub const FARPAGE_LOG_DEBUG: u32 = 4;

/// Prints messages up to `level`, one of the FARPAGE_LOG_ constants, to standard error from now on.
/// Without a call nothing is printed. Only one call is possible.
#[unsafe(no_mangle)]
pub extern "C" fn farpage_log_to_stderr(level: u32) -> farpage_code {
    guard(|| {
        let level = match level {
            FARPAGE_LOG_ERROR => Level::ERROR,
            FARPAGE_LOG_WARNING => Level::WARN,
            FARPAGE_LOG_INFO => Level::INFO,
            FARPAGE_LOG_DEBUG => Level::DEBUG,
            _ => {
                return Err(Failure::invalid(format!(
                    "a log level of {level}: need one of the FARPAGE_LOG_ constants"
                )));
            }
        };
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .finish();
        tracing::subscriber::set_global_default(subscriber)
            .map_err(|_| Failure::invalid("messages are printed already"))
    })
}
