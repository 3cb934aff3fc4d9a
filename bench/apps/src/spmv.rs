//! Sparse matrix times vector, [`ROUNDS`] steps of the power method, with a matrix like that of NAS
//! CG: [`ROW`] entries per row, at random columns.
//!
//! The matrix is remote, read once per round in order; the two vectors are local and count as local
//! memory.

use anyhow::Result;
use farpage::Advice;

use crate::{
    app::{App, Verdict, random},
    place::Place,
    team::{Team, there_and_back},
};

/// Number of entries per row. All rows have as many, so that offsets would not be needed; the
/// matrix has them as any CSR matrix does.
const ROW: usize = 32;
const ROUNDS: usize = 8;
/// Rows per piece of work: 1.5 MiB of the matrix.
const PIECE: usize = 1 << 12;
const ROW_BYTES: u64 = (ROW * (size_of::<f64>() + size_of::<u32>()) + size_of::<u64>()) as u64;

pub(crate) struct Spmv {
    rows: usize,
}

pub(crate) struct Matrix<P: Place> {
    offsets: P::Array<u64>,
    columns: P::Array<u32>,
    values: P::Array<f64>,
}

impl App for Spmv {
    type On<P: Place> = Matrix<P>;
    type Answer = Vec<f64>;

    fn generate(bytes: u64, _: &Team) -> Self {
        let rows = (bytes / ROW_BYTES) as usize;
        Self { rows }
    }

    fn local_bytes(&self, _: &Team) -> u64 {
        2 * (self.rows * size_of::<f64>()) as u64
    }

    fn load<P: Place>(&self, place: &P) -> Result<Matrix<P>> {
        let mut matrix = Matrix::<P> {
            offsets: place.array(self.rows + 1, Advice::Sequential)?,
            columns: place.array(self.rows * ROW, Advice::Sequential)?,
            values: place.array(self.rows * ROW, Advice::Sequential)?,
        };
        for (row, offset) in matrix.offsets.iter_mut().enumerate() {
            *offset = (row * ROW) as u64;
        }
        for (entry, column) in matrix.columns.iter_mut().enumerate() {
            *column = (random(14, entry as u64) % self.rows as u64) as u32;
        }
        for (entry, value) in matrix.values.iter_mut().enumerate() {
            *value = (random(15, entry as u64) >> 11) as f64 / (1_u64 << 53) as f64;
        }
        Ok(matrix)
    }

    fn work<P: Place>(&self, matrix: &mut Matrix<P>, team: &Team) -> Vec<f64> {
        let (offsets, columns, values): (&[u64], &[u32], &[f64]) =
            (&matrix.offsets, &matrix.columns, &matrix.values);
        let mut x = vec![1.0; self.rows];
        let mut y = vec![0.0_f64; self.rows];
        let mut largest = vec![0.0_f64; self.rows.div_ceil(PIECE)];
        for round in 0..ROUNDS {
            let pieces = y.chunks_mut(PIECE).zip(&mut largest).enumerate();
            team.each(there_and_back(round, pieces), |(piece, (y, largest))| {
                for (y, row) in y.iter_mut().zip(piece * PIECE..) {
                    let entries = offsets[row] as usize..offsets[row + 1] as usize;
                    let entries = columns[entries.clone()].iter().zip(&values[entries]);
                    let products = entries.map(|(&column, value)| value * x[column as usize]);
                    *y = products.sum();
                }
                *largest = y.iter().copied().fold(0.0, f64::max);
            });
            // The largest element becomes 1.
            let scale = 1.0 / largest.iter().copied().fold(0.0, f64::max);
            for (x, y) in x.iter_mut().zip(&y) {
                *x = y * scale;
            }
        }
        x
    }

    fn verify<P: Place>(&self, _: &Matrix<P>, x: &Vec<f64>, local: &Vec<f64>) -> Verdict {
        crate::app::verify_bits(x, local)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{assert_rejected, ran, team},
        *,
    };
    use crate::place::Local;

    #[test]
    fn a_vector_is_multiplied_and_another_result_is_rejected() {
        let app = Spmv::generate(10_000 * ROW_BYTES, &team());
        let (mut on, found) = ran(&app);

        let mut x = vec![1.0; app.rows];
        for _ in 0..ROUNDS {
            let mut y = vec![0.0; app.rows];
            for (entry, (&column, value)) in on.columns.iter().zip(&*on.values).enumerate() {
                y[entry / ROW] += value * x[column as usize];
            }
            let largest = y.iter().copied().fold(0.0, f64::max);
            x = y.iter().map(|y| y / largest).collect();
        }
        for (x, found) in x.iter().zip(&found) {
            assert!((x - found).abs() < 1e-12, "{x} {found}");
        }

        on.values[5] += 1e-9;
        assert_rejected(&app, &mut on, &found);
        app.verify::<Local>(&on, &found[1..].to_vec(), &found)
            .unwrap_err();
    }
}
