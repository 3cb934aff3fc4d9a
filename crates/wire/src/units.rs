//! Notation of times and sizes in environment variables, configuration files and flags.
//!
//! The rule it keeps: one way everywhere. A number without a unit is seconds, or bytes; an error
//! repeats what was written and gives an example.

use std::time::Duration;

use bytesize::ByteSize;

crate::debug_as_display!(UnitError);

/// Text that is no time, or no size.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// Text that is no time.
    #[error("`{0}` is no time: write it like `500ms`, `5s` or `2min` (a plain number is seconds)")]
    Time(String),
    /// Text that is no size.
    #[error(
        "`{0}` is no size: write it like `64KiB` or `4GiB` (a plain number is bytes; KiB is 1024 \
         bytes, KB is 1000)"
    )]
    Size(String),
}

/// Reads a time: `500ms`, `5s`, `1min 30s`, or a number of seconds, also a fraction.
///
/// # Errors
/// [`UnitError::Time`].
pub fn parse_time(text: &str) -> Result<Duration, UnitError> {
    let text = text.trim();
    let time = match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => humantime::parse_duration(text).ok(),
    };
    time.ok_or_else(|| UnitError::Time(text.to_owned()))
}

/// Reads a size: `64KiB`, `4 GiB`, `100MB`, or a number of bytes.
///
/// # Errors
/// [`UnitError::Size`].
pub fn parse_size(text: &str) -> Result<ByteSize, UnitError> {
    let text = text.trim();
    text.parse()
        .map_err(|_: String| UnitError::Size(text.to_owned()))
}

/// Writes sizes for people: rounded, or in bytes where two that differ would read alike.
pub fn told_apart<const COUNT: usize>(sizes: [u64; COUNT]) -> [String; COUNT] {
    let rounded = sizes.map(|bytes| ByteSize::b(bytes).to_string());
    let pairs = || sizes.iter().zip(&rounded);
    let read_alike = pairs().any(|(a, text)| pairs().any(|(b, other)| a != b && text == other));
    match read_alike {
        true => sizes.map(|bytes| format!("{bytes} bytes")),
        false => rounded,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_differ_never_read_alike() {
        assert_eq!(told_apart([32 << 30, 6 << 30]), ["32.0 GiB", "6.0 GiB"]);
        assert_eq!(told_apart([1 << 20, 1 << 20]), ["1.0 MiB", "1.0 MiB"]);
        assert_eq!(
            told_apart([(256 << 20) + 1, 256 << 20]),
            ["268435457 bytes", "268435456 bytes"]
        );
    }

    #[test]
    fn times_have_units_or_are_seconds() {
        let millis = |text| parse_time(text).map(|time| time.as_millis());
        assert_eq!(millis("5s"), Ok(5_000));
        assert_eq!(millis("500ms"), Ok(500));
        assert_eq!(millis("2min"), Ok(120_000));
        assert_eq!(millis("1m 30s"), Ok(90_000));
        assert_eq!(millis("10"), Ok(10_000));
        assert_eq!(millis(" 0.25 "), Ok(250));
        for text in ["", "soon", "-1", "1e300", "inf", "5 parsecs"] {
            let error = parse_time(text).expect_err(text).to_string();
            assert!(
                error.starts_with(&format!("`{text}` is no time")),
                "{error}"
            );
            assert!(error.contains("500ms"), "{error}");
        }
    }

    #[test]
    fn sizes_have_units_or_are_bytes() {
        let bytes = |text| parse_size(text).map(|size| size.as_u64());
        assert_eq!(bytes("64KiB"), Ok(64 << 10));
        assert_eq!(bytes("4 GiB"), Ok(4 << 30));
        assert_eq!(bytes("100MB"), Ok(100_000_000));
        assert_eq!(bytes("4096"), Ok(4096));
        for text in ["", "nonsense", "64 Kirby", "-1"] {
            let error = parse_size(text).expect_err(text).to_string();
            assert!(
                error.starts_with(&format!("`{text}` is no size")),
                "{error}"
            );
            assert!(error.contains("64KiB"), "{error}");
        }
    }
}
