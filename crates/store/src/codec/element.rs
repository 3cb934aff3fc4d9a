//! [`Element`]: the type of an array's elements, as far as codecs can tell types apart.

use std::{any::TypeId, fmt, mem};

use serde::{Deserialize, Serialize};

use crate::ElementType;

/// The elements of an array, as far as codecs can tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Element {
    /// `f32`.
    F32,
    /// `f64`.
    F64,
    /// `i32`.
    I32,
    /// `i64`.
    I64,
    /// Any other type.
    Other {
        /// Bytes of one element.
        bytes: usize,
    },
}

impl Element {
    /// Returns the element that codecs see in type `T`.
    pub fn of<T: 'static>() -> Self {
        let numbers = [
            (TypeId::of::<f32>(), Self::F32),
            (TypeId::of::<f64>(), Self::F64),
            (TypeId::of::<i32>(), Self::I32),
            (TypeId::of::<i64>(), Self::I64),
        ];
        let known = numbers.iter().find(|(id, _)| *id == TypeId::of::<T>());
        let bytes = mem::size_of::<T>();
        known.map_or(Self::Other { bytes }, |(_, element)| *element)
    }

    /// Returns the element that codecs see in a type that is only known at run time.
    pub fn of_type(of: &ElementType) -> Self {
        match of.number.as_str() {
            "f32" => Self::F32,
            "f64" => Self::F64,
            "i32" => Self::I32,
            "i64" => Self::I64,
            _ => Self::Other {
                bytes: of.bytes as usize,
            },
        }
    }

    /// Returns the bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
            Self::Other { bytes } => bytes,
        }
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::F64 => f.write_str("f64"),
            Self::I32 => f.write_str("i32"),
            Self::I64 => f.write_str("i64"),
            Self::Other { bytes } => write!(f, "elements of {bytes} bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_known_by_their_type() {
        assert_eq!(Element::of::<f32>(), Element::F32);
        assert_eq!(Element::of::<i64>(), Element::I64);
        assert_eq!(Element::of::<u16>(), Element::Other { bytes: 2 });
        assert_eq!(Element::of::<[f32; 3]>(), Element::Other { bytes: 12 });
    }
}
