//! Initial contents of the arrays: fields that stand in for scientific data, or a file with real
//! data.
//!
//! The rule it keeps: every value is a function of the seed and the element's index alone, so that
//! verification computes it again or looks it up. A field has about a million elements and goes on
//! from its beginning where an array is longer, far beyond what any codec remembers. Nothing here
//! is a copy of data: the generators imitate what a compressor sees (smoothness, spectra,
//! magnitudes, order), after the public descriptions of the data sets of SDRBench,
//! <https://sdrbench.github.io>.

mod fields;
mod file;
mod formula;
mod noise;

use std::{fmt, path::PathBuf};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use farpage::Pod;
use serde::Serialize;

use self::formula::Formula;
use crate::names::name_of;

/// Options for the contents of the arrays.
#[derive(Args, Clone, Debug, Default)]
pub struct DataOptions {
    /// Initial contents of the arrays. `constant` is McCalpin's choice; pages of one repeated value
    /// cost no transfer here, so it says little about the network
    #[arg(long, value_enum, default_value_t = Contents::Random)]
    pub data: Contents,
    /// Holds the values of this file instead: numbers in the machine's byte order and nothing else,
    /// as in SDRBench. Needs --dtype and --shape
    #[arg(long, value_name = "FILE", conflicts_with = "data", requires_all = ["dtype", "shape"])]
    pub data_file: Option<PathBuf>,
    /// Type of the elements [default: the natural type of --data]
    #[arg(long, value_enum)]
    pub dtype: Option<Dtype>,
    /// Elements of the file in each dimension, the slowest first, such as 100x500x500
    #[arg(long, value_name = "N[xN[xN]]", requires = "data_file", value_parser = Shape::parse)]
    pub shape: Option<Shape>,
}

/// Fields. Each variant names the data set of SDRBench that it imitates, with its shape and type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Contents {
    /// One value everywhere
    Constant,
    /// Random mantissas, f64: nothing to compress
    #[default]
    Random,
    /// A slow sine, 1-D f64
    Smooth,
    /// A random walk, 1-D f64, as the Brown samples (33554433)
    Brown,
    /// Temperature of the atmosphere, 2-D f32, as CESM-ATM (1800x3600)
    Climate,
    /// Wind of a cyclone, 3-D f32, as Hurricane ISABEL (100x500x500)
    Hurricane,
    /// Cloud water, 3-D f32, mostly zero, as SCALE-LETKF (98x1200x1200)
    Clouds,
    /// A velocity of turbulent flow, 3-D f64, as Miranda (256x384x384)
    Turbulence,
    /// Temperature about a flame, 3-D f64, as S3D (500x500x500)
    Combustion,
    /// Density of gas between galaxies, 3-D f32, as NYX (512x512x512)
    Density,
    /// Orbitals of electrons, 3-D f32, as QMCPACK (288x115x69x69)
    Orbitals,
    /// Photons counted by a detector, 2-D f32, as EXAFEL (10x32x185x388)
    Detector,
    /// A coordinate of particles in halos, 1-D f32, as HACC (280953867)
    Positions,
    /// A velocity of particles in halos, 1-D f32, as HACC (280953867)
    Velocities,
    /// A coordinate of atoms about a lattice, 1-D f32, as EXAALT (2869440)
    Atoms,
    /// Integrals over pairs of electrons, 1-D f64, of all magnitudes, as NWChem (801098891)
    Integrals,
    /// Neighbours in a graph, i32 (not in SDRBench)
    GraphColumns,
    /// Offsets of each vertex's neighbours, i64 (not in SDRBench)
    GraphOffsets,
    /// Text, bytes (not in SDRBench)
    Text,
}

/// Type of an element.
#[allow(missing_docs, reason = "the names say it, and clap would print more")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F32,
    F64,
    I32,
    I64,
    U8,
}

/// Elements in each dimension: z, y, x. Absent dimensions count as 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Shape(pub [usize; 3]);

/// Function that makes a field of a shape from a seed. Elements of all types fit into an f64.
type Make = fn(u64, [usize; 3]) -> Vec<f64>;

const LINE: Shape = Shape([1, 1, 1 << 20]);
const SQUARE: Shape = Shape([1, 1024, 1024]);
const CUBE: Shape = Shape([64, 128, 128]);

/// Type, shape and generator of a field.
struct About {
    dtype: Dtype,
    shape: Shape,
    how: How,
}

enum How {
    Formula(Formula),
    Make(Make),
}

impl Contents {
    /// Returns the name of the field on the command line.
    pub fn name(self) -> String {
        name_of(&self)
    }

    /// Returns the natural type of the field's elements.
    pub fn dtype(self) -> Dtype {
        self.about().dtype
    }

    /// Returns an error that hurts no use of the field: about a ten-thousandth of the range of its
    /// values, as evaluations of lossy compressors often choose. Integrals of all magnitudes are
    /// usually bounded more tightly. Integers and text allow no loss.
    pub fn error_bound(self) -> f64 {
        match self {
            Self::Integrals => 1e-10,
            Self::Clouds => 1e-7,
            Self::Constant | Self::Random | Self::Smooth | Self::Brown | Self::Orbitals => 1e-4,
            Self::Turbulence => 1e-3,
            Self::Climate | Self::Hurricane | Self::Density | Self::Positions | Self::Atoms => 1e-2,
            Self::Combustion | Self::Velocities | Self::Detector => 1e-1,
            Self::GraphColumns | Self::GraphOffsets | Self::Text => 0.0,
        }
    }

    fn about(self) -> About {
        use Dtype::{F32, F64, I32, I64, U8};
        let about = |dtype, shape, how| About { dtype, shape, how };
        let made = |dtype, shape, make: Make| about(dtype, shape, How::Make(make));
        let computed = |formula| about(F64, LINE, How::Formula(formula));
        match self {
            Self::Constant => computed(Formula::Constant),
            Self::Random => computed(Formula::Random),
            Self::Smooth => computed(Formula::Smooth),
            Self::Brown => made(F64, LINE, fields::brown),
            Self::Climate => made(F32, SQUARE, fields::climate),
            Self::Hurricane => made(F32, CUBE, fields::hurricane),
            Self::Clouds => made(F32, CUBE, fields::clouds),
            Self::Turbulence => made(F64, CUBE, fields::turbulence),
            Self::Combustion => made(F64, CUBE, fields::combustion),
            Self::Density => made(F32, CUBE, fields::density),
            Self::Orbitals => made(F32, CUBE, fields::orbitals),
            Self::Detector => made(F32, SQUARE, fields::detector),
            Self::Positions => made(F32, LINE, fields::positions),
            Self::Velocities => made(F32, LINE, fields::velocities),
            Self::Atoms => made(F32, LINE, fields::atoms),
            Self::Integrals => made(F64, LINE, fields::integrals),
            Self::GraphColumns => made(I32, LINE, fields::columns),
            Self::GraphOffsets => made(I64, LINE, fields::offsets),
            Self::Text => made(U8, LINE, fields::text),
        }
    }
}

impl Dtype {
    /// Returns the bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }

    /// True if elements have a fraction.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }

    /// Returns the bits of `value` as an element of this type.
    fn bits(self, value: f64) -> u64 {
        match self {
            Self::F32 => (value as f32).to_bits().into(),
            Self::F64 => value.to_bits(),
            Self::I32 => (value as i32 as u32).into(),
            Self::I64 => value as i64 as u64,
            Self::U8 => (value as u8).into(),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name_of(self))
    }
}

impl Shape {
    /// Parses text such as 100x500x500.
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || "has to be one to three numbers above 0, such as 100x500x500".to_owned();
        let number = |n: &str| n.trim().parse().ok().filter(|&n| n > 0).ok_or_else(wrong);
        let numbers = text.split('x').map(number).collect::<Result<Vec<_>, _>>()?;
        let mut shape = [1; 3];
        let missing = shape.len().checked_sub(numbers.len()).ok_or_else(wrong)?;
        shape[missing..].copy_from_slice(&numbers);
        let elements = shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        elements.map(|_| Self(shape)).ok_or_else(wrong)
    }

    /// Returns the dimensions without absent leading ones.
    pub fn trimmed(self) -> Vec<usize> {
        self.0[3 - self.dimensions()..].to_vec()
    }

    /// Returns the number of elements in all dimensions together.
    pub fn elements(self) -> usize {
        self.0.iter().product()
    }

    /// Counts the dimensions without absent leading ones; at least 1.
    pub fn dimensions(self) -> usize {
        3 - self.0[..2].iter().take_while(|&&n| n == 1).count()
    }
}

/// An element of an array, as the benchmarks compute with it.
pub trait Element: Pod + Default + PartialEq + Send + Sync {
    /// Converts `value` to an element.
    fn of(value: f64) -> Self;
    /// Returns the absolute difference of two elements.
    fn distance(self, other: Self) -> f64;
}

macro_rules! elements {
    ($($type:ty),*) => {$(
        impl Element for $type {
            fn of(value: f64) -> Self {
                value as $type
            }
            fn distance(self, other: Self) -> f64 {
                (self as f64 - other as f64).abs()
            }
        }
    )*};
}

elements!(f32, f64, i32, i64, u8);

/// Source of the values of an array.
pub struct Source {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Shape of the field, which a longer array repeats.
    pub shape: Shape,
    values: Values,
}

enum Values {
    Formula(Formula, u64),
    Field(Vec<f64>),
}

impl DataOptions {
    /// Returns the name of the data for people and reports.
    pub fn name(&self) -> String {
        match &self.data_file {
            Some(path) => path.display().to_string(),
            None => self.data.name(),
        }
    }
}

impl Source {
    /// Makes the source that `options` ask for.
    ///
    /// # Errors
    /// A file that cannot be read or is not of its shape, or a type that the field does not have.
    pub fn new(options: &DataOptions, seed: u64) -> Result<Self> {
        match (&options.data_file, options.dtype, options.shape) {
            (Some(path), Some(dtype), Some(shape)) => Ok(Self {
                dtype,
                shape,
                values: Values::Field(file::read(path, dtype, shape)?),
            }),
            _ => Self::generated(options.data, options.dtype, seed),
        }
    }

    fn generated(data: Contents, dtype: Option<Dtype>, seed: u64) -> Result<Self> {
        let about = data.about();
        let dtype = dtype.unwrap_or(about.dtype);
        if dtype != about.dtype && !(dtype.is_float() && about.dtype.is_float()) {
            bail!(
                "--data {} is of {} by nature and cannot be made of {dtype}: f32 and f64 stand for each other, other types for themselves only",
                data.name(),
                about.dtype,
            );
        }
        let values = match about.how {
            How::Formula(formula) => Values::Formula(formula, seed),
            How::Make(make) => Values::Field(make(seed, about.shape.0)),
        };
        Ok(Self {
            dtype,
            shape: about.shape,
            values,
        })
    }

    /// Returns the value of element `index` of an array.
    pub fn value(&self, index: u64) -> f64 {
        match &self.values {
            Values::Formula(formula, seed) => formula.value(*seed, index),
            Values::Field(field) => field[(index % field.len() as u64) as usize],
        }
    }

    /// Returns eight bytes of the array from byte `8 * index` on.
    pub fn word(&self, index: u64) -> u64 {
        if let Values::Formula(formula, seed) = &self.values {
            return formula.word(*seed, index);
        }
        let elements = 8 / self.dtype.bytes() as u64;
        (0..elements).rev().fold(0, |word, at| {
            let bits = self.dtype.bits(self.value(index * elements + at));
            // An element of eight bytes fills the word: a shift by 64 bits would overflow.
            match elements {
                1 => bits,
                _ => word << (64 / elements) | bits,
            }
        })
    }

    /// Returns the field itself, without repetition.
    pub fn field<T: Element>(&self) -> Vec<T> {
        (0..self.shape.elements() as u64)
            .map(|index| T::of(self.value(index)))
            .collect()
    }
}

/// Returns a word of eight bytes that looks random.
pub fn random_word(seed: u64, index: u64) -> u64 {
    Formula::Random.word(seed, index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(data: Contents) -> Source {
        Source::generated(data, None, 7).unwrap()
    }

    #[test]
    fn every_field_has_its_shape_and_finite_values_that_its_type_can_hold() {
        for &data in Contents::value_variants() {
            let source = source(data);
            let values: Vec<f64> = source.field();
            assert_eq!(values.len(), source.shape.elements(), "{data:?}");
            let kept = |value: f64| match source.dtype {
                Dtype::I32 => f64::from(value as i32),
                Dtype::I64 => value as i64 as f64,
                Dtype::U8 => f64::from(value as u8),
                Dtype::F32 | Dtype::F64 => value,
            };
            let range = match data.about().how {
                How::Formula(_) => 1.0..=2.0,
                How::Make(_) => f64::MIN..=f64::MAX,
            };
            let is_right = |&value: &f64| range.contains(&value) && kept(value) == value;
            assert!(values.iter().all(is_right), "{data:?}");
        }
    }

    #[test]
    fn the_seed_decides_everything_and_changes_everything() {
        for &data in Contents::value_variants() {
            let first = |seed: u64| match data.about().how {
                How::Formula(formula) => (0..99).map(|at| formula.value(seed, at)).collect(),
                How::Make(make) => make(seed, [2, 24, 24]),
            };
            assert_eq!(first(7), first(7), "{data:?}");
            if !matches!(data, Contents::Constant | Contents::Smooth) {
                assert_ne!(first(7), first(8), "{data:?}");
            }
        }
    }

    #[test]
    fn error_bounds_are_about_a_ten_thousandth_of_the_range() {
        for &data in Contents::value_variants() {
            if matches!(data, Contents::Constant | Contents::Integrals) || !data.dtype().is_float()
            {
                continue;
            }
            let field: Vec<f64> = source(data).field();
            let most = field.iter().copied().fold(f64::MIN, f64::max);
            let least = field.iter().copied().fold(f64::MAX, f64::min);
            let share = data.error_bound() / (most - least);
            assert!((1e-5..=1e-3).contains(&share), "{data:?}: {share:e}");
        }
    }

    /// Returns how far neighbours along x are apart, in standard deviations of the field.
    fn roughness(data: Contents) -> f64 {
        let field: Vec<f64> = source(data).field();
        let mean = field.iter().sum::<f64>() / field.len() as f64;
        let variance = field.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
        let steps = field.windows(2).map(|two| (two[1] - two[0]).powi(2));
        (steps.sum::<f64>() / variance).sqrt()
    }

    #[test]
    fn fields_are_as_smooth_as_what_they_imitate() {
        for (data, least, most) in [
            (Contents::Smooth, 0.0, 0.001),
            (Contents::Brown, 0.0, 0.01),
            (Contents::Climate, 0.0, 0.05),
            (Contents::Hurricane, 0.0, 0.2),
            (Contents::Orbitals, 0.0, 0.3),
            (Contents::Turbulence, 0.1, 1.0),
            (Contents::Velocities, 0.3, 1.5),
            (Contents::Random, 1.3, 1.5),
        ] {
            let rough = roughness(data);
            assert!((least..=most).contains(&rough), "{data:?}: {rough}");
        }
    }

    #[test]
    fn clouds_and_photons_are_mostly_zero_and_offsets_ascend() {
        for (data, least) in [(Contents::Clouds, 0.7), (Contents::Detector, 0.5)] {
            let field: Vec<f64> = source(data).field();
            let zeros = field.iter().filter(|x| **x == 0.0).count() as f64 / field.len() as f64;
            assert!((least..=0.97).contains(&zeros), "{data:?}: {zeros}");
        }
        let offsets: Vec<i64> = source(Contents::GraphOffsets).field();
        assert!(offsets.is_sorted());
    }

    #[test]
    fn words_are_the_bytes_of_the_elements() {
        let text = source(Contents::Text);
        let bytes: Vec<u8> = text.field();
        let clouds = source(Contents::Climate);
        let floats: Vec<f32> = clouds.field();
        for index in [0, 1, 77] {
            let at = 8 * index as usize;
            assert_eq!(text.word(index).to_le_bytes(), bytes[at..at + 8]);
            let two = [floats[at / 4], floats[at / 4 + 1]].map(f32::to_le_bytes);
            assert_eq!(clouds.word(index).to_le_bytes(), two.concat()[..]);
        }
    }

    #[test]
    fn a_field_of_integers_is_not_made_of_floats() {
        let error = Source::generated(Contents::Text, Some(Dtype::F32), 1).err();
        assert!(error.unwrap().to_string().contains("text"));
        assert!(Source::generated(Contents::Turbulence, Some(Dtype::F32), 1).is_ok());
    }

    #[test]
    fn a_shape_is_one_to_three_numbers() {
        assert_eq!(Shape::parse("100x500x500"), Ok(Shape([100, 500, 500])));
        assert_eq!(Shape::parse("7"), Ok(Shape([1, 1, 7])));
        assert_eq!(Shape::parse("2x3").map(Shape::dimensions), Ok(2));
        let huge = "4294967296x4294967296";
        for wrong in ["", "x", "0", "1x0", "-1", "1x2x3x4", huge, "9,9"] {
            assert!(Shape::parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
