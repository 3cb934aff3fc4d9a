//! [`Elements`]: what a named array remembers of its type, so that it is opened with no other.
//!
//! The rule it keeps: numbers are told apart by their type, everything else by its size and
//! alignment. Names of other types are left out: they change when a program is reorganised.

use std::{any::TypeId, fmt, mem};

use serde::{Deserialize, Serialize};

/// The elements of a typed array.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Elements {
    /// How many there are.
    pub len: u64,
    /// The type of each.
    pub of: ElementType,
}

/// The type of an array's elements, as far as it can be told by another program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ElementType {
    /// `u8` to `u128`, `i8` to `i128`, `f32`, `f64`; empty for other types.
    pub number: String,
    /// Bytes of one.
    pub bytes: u64,
    /// What its address is a multiple of.
    pub align: u64,
}

impl Elements {
    /// `len` elements of type `T`.
    pub fn new<T: 'static>(len: usize) -> Self {
        Self {
            len: len as u64,
            of: ElementType::of::<T>(),
        }
    }

    /// Whether `bytes` bytes hold them.
    pub(crate) fn fit(&self, bytes: u64) -> bool {
        (self.len.checked_mul(self.of.bytes)).is_some_and(|needed| needed <= bytes)
    }
}

impl fmt::Display for Elements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements of type {}", self.len, self.of)
    }
}

impl ElementType {
    /// What is told of type `T`.
    pub fn of<T: 'static>() -> Self {
        macro_rules! number {
            ($($number:ident)*) => {
                [$((TypeId::of::<$number>(), stringify!($number))),*]
            };
        }
        let numbers = number!(u8 u16 u32 u64 u128 i8 i16 i32 i64 i128 f32 f64);
        // As wide as addresses are, and the same bytes as the number of that width.
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
        assert!(Elements::new::<u64>(6).fit(48) && !Elements::new::<u64>(6).fit(47));
        assert!(!Elements::new::<u64>(usize::MAX).fit(u64::MAX));
    }
}
