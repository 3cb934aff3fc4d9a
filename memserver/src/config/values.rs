//! Values of the configuration file: sizes, times and lists, as flags take them.
//!
//! The rule it keeps: text is read as the flag's text is, and a number has the unit of no unit.

use std::{fmt, str::FromStr, time::Duration};

use bytesize::ByteSize;
use serde::{Deserialize, Deserializer, de};

/// Reads a size of the file: text with a unit, or a number of bytes.
pub(super) fn size<'de, D: Deserializer<'de>>(value: D) -> Result<Option<ByteSize>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "a size is text like \"8GiB\", or a number of bytes"
    )]
    enum Written {
        Bytes(u64),
        Text(String),
    }
    match Written::deserialize(value)? {
        Written::Bytes(bytes) => Ok(Some(ByteSize::b(bytes))),
        Written::Text(text) => farpage_wire::parse_size(&text)
            .map(Some)
            .map_err(de::Error::custom),
    }
}

/// Reads a time of the file: text with a unit, or a number of seconds.
pub(super) fn time<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Duration>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "a time is text like \"60s\", or a number of seconds"
    )]
    enum Written {
        Seconds(f64),
        Text(String),
    }
    let text = match Written::deserialize(value)? {
        Written::Seconds(seconds) => seconds.to_string(),
        Written::Text(text) => text,
    };
    farpage_wire::parse_time(&text)
        .map(Some)
        .map_err(de::Error::custom)
}

/// Reads several values of the file: a list, or text that separates them by commas, as a flag does.
pub(super) fn list<'de, D: Deserializer<'de>, T: FromStr<Err: fmt::Display>>(
    value: D,
) -> Result<Vec<T>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "several values are a list of texts, or one text with commas"
    )]
    enum Written {
        List(Vec<String>),
        Text(String),
    }
    let values = match Written::deserialize(value)? {
        Written::List(values) => values,
        Written::Text(text) => text.split(',').map(str::to_owned).collect(),
    };
    let values = values.iter().map(|text| text.parse());
    values.collect::<Result<_, _>>().map_err(de::Error::custom)
}
