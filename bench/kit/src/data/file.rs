//! Files as SDRBench has them: numbers one after the other, in the byte order of x86, without a
//! header.
//!
//! The rule it keeps: a file that does not have exactly the given shape and type is refused, since
//! every value would be wrong.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};

use super::{Dtype, Shape};

/// Reads all values of the file at `path`.
///
/// # Errors
/// The file cannot be read, has another size than `shape` and `dtype` make, or integers above 2^53.
pub(super) fn read(path: &Path, dtype: Dtype, shape: Shape) -> Result<Vec<f64>> {
    let shown = path.display();
    let found = fs::metadata(path)
        .with_context(|| format!("cannot find the data file {shown}"))?
        .len();
    let expected = shape.elements() as u64 * dtype.bytes() as u64;
    ensure!(
        found == expected,
        "the data file {shown} has {found} bytes, but --shape {} of {dtype} makes {expected}: check --shape and --dtype \
         (SDRBench names files .f32 and .d64 or .f64 by their type)",
        shape.0.map(|n| n.to_string()).join("x"),
    );
    let bytes = fs::read(path).with_context(|| format!("cannot read the data file {shown}"))?;
    Ok(match dtype {
        Dtype::F32 => values(&bytes, |x| f32::from_le_bytes(x).into()),
        Dtype::F64 => values(&bytes, f64::from_le_bytes),
        Dtype::I32 => values(&bytes, |x| i32::from_le_bytes(x).into()),
        Dtype::I64 => {
            let exact = values(&bytes, |x| i64::from_le_bytes(x) as f64);
            ensure!(
                exact.iter().all(|x| x.abs() <= EXACT_MAX),
                "the data file {shown} has integers above 2^53, which cannot be handled: give it as --dtype f64"
            );
            exact
        }
        Dtype::U8 => values(&bytes, |[x]| x.into()),
    })
}

/// Largest magnitude up to which every integer is exact as an f64.
const EXACT_MAX: f64 = (1u64 << 53) as f64;

fn values<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|x| value(*x)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_its_type_and_refused_in_another_size() {
        let path = std::env::temp_dir().join(format!("farpage-data-{}.f32", std::process::id()));
        let numbers = [1.5f32, -2.0, 1e30, 0.25, 7.0, 8.0];
        fs::write(&path, numbers.map(f32::to_le_bytes).concat()).unwrap();
        let read = |dtype, shape| read(&path, dtype, Shape(shape));
        let found = read(Dtype::F32, [1, 2, 3]).unwrap();
        let too_large = read(Dtype::F32, [1, 2, 4]).unwrap_err().to_string();
        let too_small = read(Dtype::F64, [1, 1, 2]).unwrap_err().to_string();
        fs::remove_file(&path).unwrap();
        assert_eq!(found, numbers.map(f64::from));
        let is_told = too_large.contains("24 bytes") && too_large.contains("1x2x4");
        assert!(is_told, "{too_large}");
        assert!(too_small.contains("makes 16"), "{too_small}");
        let absent = read(Dtype::F32, [1, 2, 3]).unwrap_err();
        assert!(format!("{absent:#}").contains("farpage-data"), "{absent:#}");
    }
}
