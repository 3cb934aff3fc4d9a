//! [`Elements`]: what a named array remembers of its type, so that it is opened with no other.
//!
//! The rule it keeps: numbers are told apart by their type, everything else by its size and
//! alignment. Rust's names of other types are left out: they change when a program is reorganised.
//! Types of other languages come with names that last.

use std::{any::TypeId, fmt, mem};

use serde::{Deserialize, Serialize};

/// The elements of a typed array.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Elements {
    /// Number of elements.
    pub len: u64,
    /// Type of each element.
    pub of: ElementType,
}

/// The type of an array's elements, as far as it can be told by another program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ElementType {
    /// Name of a number type (`u8` to `u128`, `i8` to `i128`, `f32`, `f64`) or of another
    /// language's own type; empty for other types.
    pub number: String,
    /// Bytes of one element.
    pub bytes: u64,
    /// Alignment of an element, in bytes.
    pub align: u64,
}

impl Elements {
    /// Returns `len` elements of type `T`.
    pub fn new<T: 'static>(len: usize) -> Self {
        Self::of(len as u64, ElementType::of::<T>())
    }

    /// Returns `len` elements of a type that is only known at run time.
    pub fn of(len: u64, of: ElementType) -> Self {
        Self { len, of }
    }

    /// True if `bytes` bytes hold the elements.
    pub(crate) fn fit(&self, bytes: u64) -> bool {
        (self.len.checked_mul(self.of.bytes)).is_some_and(|needed| needed <= bytes)
    }
}

impl fmt::Display for Elements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements of type {}", self.len, self.of)
    }
}

/// Calls a macro with the number types that have names.
macro_rules! with_numbers {
    ($use:ident) => {
        $use!(u8 u16 u32 u64 u128 i8 i16 i32 i64 i128 f32 f64)
    };
}

impl ElementType {
    /// Returns the number type that Rust calls `name`, such as `f32`.
    pub fn number(name: &str) -> Option<Self> {
        macro_rules! find {
            ($($number:ident)*) => {
                match name {
                    $(stringify!($number) => Some(Self::of::<$number>()),)*
                    _ => None,
                }
            };
        }
        with_numbers!(find)
    }

    /// Returns a type of another language, by a name that no number type has. `bytes` is the size
    /// of one element.
    pub fn foreign(name: impl Into<String>, bytes: u64, align: u64) -> Self {
        Self {
            number: name.into(),
            bytes,
            align,
        }
    }

    /// Returns the element type of `T`.
    pub fn of<T: 'static>() -> Self {
        macro_rules! ids {
            ($($number:ident)*) => {
                [$((TypeId::of::<$number>(), stringify!($number))),*]
            };
        }
        let numbers = with_numbers!(ids);
        // `usize` is as wide as an address, with the same bytes as the number of that width.
        let id = match (TypeId::of::<T>(), usize::BITS) {
            (id, 64) if id == TypeId::of::<usize>() => TypeId::of::<u64>(),
            (id, 64) if id == TypeId::of::<isize>() => TypeId::of::<i64>(),
            (id, _) => id,
        };
        let known = numbers.iter().find(|(number, _)| *number == id);
        Self {
            number: known.map_or("", |(_, name)| name).to_owned(),
            bytes: mem::size_of::<T>() as u64,
            align: mem::align_of::<T>() as u64,
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number.as_str() {
            "" => write!(f, "[{} bytes, aligned to {}]", self.bytes, self.align),
            number => f.write_str(number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_told_by_their_type_and_others_by_size_and_alignment() {
        let says = |element: ElementType| element.to_string();
        assert_eq!(says(ElementType::of::<f32>()), "f32");
        assert_ne!(ElementType::of::<f32>(), ElementType::of::<u32>());
        assert_eq!(ElementType::of::<usize>(), ElementType::of::<u64>());
        assert_eq!(
            says(ElementType::of::<[f32; 3]>()),
            "[12 bytes, aligned to 4]"
        );
        assert_ne!(ElementType::of::<[f32; 3]>(), ElementType::of::<[u8; 12]>());
        assert_eq!(
            Elements::new::<u64>(6).to_string(),
            "6 elements of type u64"
        );
        assert_eq!(ElementType::number("f32"), Some(ElementType::of::<f32>()));
        assert_eq!(ElementType::number("complex64"), None);
        assert_eq!(says(ElementType::foreign("numpy:<c8", 8, 4)), "numpy:<c8");
        assert!(Elements::new::<u64>(6).fit(48) && !Elements::new::<u64>(6).fit(47));
        assert!(!Elements::new::<u64>(usize::MAX).fit(u64::MAX));
    }
}
