//! [`Products`]: matrix products of `f32`, on one thread.
//!
//! The rule it keeps: an element is the sum of its products in ascending order of the inner index,
//! each product rounded and then each sum. So a result does not depend on the processor, on the
//! compiler or on the blocking, which only decides which elements are computed side by side. Fused
//! multiply-add would change results and is absent on the processors that a build is for.
//!
//! The blocking: four rows by eight columns fit into the registers of every x86-64. Both operands
//! are packed first, so that the innermost loop reads each of them in address order.

const ROWS: usize = 4;
const COLUMNS: usize = 8;

/// The left operand: element (i, j) is at `i * row + j * column`.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row: usize,
    pub(crate) column: usize,
}

/// Memory for packed operands, kept from one product to the next.
#[derive(Debug, Default)]
pub(crate) struct Products {
    left: Vec<[f32; ROWS]>,
    right: Vec<[f32; COLUMNS]>,
    transposed: Vec<f32>,
}

impl Products {
    /// Sets `out` to the product of `left`, which has `inner` columns, and `right`, which has
    /// `inner` rows of `columns` elements.
    pub(crate) fn multiply(
        &mut self,
        left: Left<'_>,
        inner: usize,
        right: &[f32],
        columns: usize,
        out: &mut [f32],
    ) {
        assert_eq!(right.len(), inner * columns, "the right operand's shape");
        let rows = out.len() / columns;
        // 1. Rows beyond the last are zero, and what they give is dropped.
        self.left.clear();
        for first in (0..rows).step_by(ROWS) {
            let height = ROWS.min(rows - first);
            for j in 0..inner {
                let mut packed = [0.0; ROWS];
                for (i, value) in packed[..height].iter_mut().enumerate() {
                    *value = left.data[(first + i) * left.row + j * left.column];
                }
                self.left.push(packed);
            }
        }
        for first in (0..columns).step_by(COLUMNS) {
            // 2. Eight columns of the right operand.
            let width = COLUMNS.min(columns - first);
            self.right.clear();
            self.right.extend(right.chunks_exact(columns).map(|row| {
                let mut packed = [0.0; COLUMNS];
                packed[..width].copy_from_slice(&row[first..first + width]);
                packed
            }));
            // 3. Four rows of the result at a time.
            for (block, left) in self.left.chunks_exact(inner).enumerate() {
                let sums = block_product(left, &self.right);
                let rows = out[block * ROWS * columns..].chunks_mut(columns);
                for (row, sums) in rows.zip(&sums) {
                    row[first..first + width].copy_from_slice(&sums[..width]);
                }
            }
        }
    }

    /// As [`multiply`](Self::multiply), with `right` as the transpose of `of`, which has `columns`
    /// rows of `inner` elements.
    pub(crate) fn multiply_by_transpose(
        &mut self,
        left: Left<'_>,
        inner: usize,
        of: &[f32],
        columns: usize,
        out: &mut [f32],
    ) {
        let mut transposed = std::mem::take(&mut self.transposed);
        transposed.clear();
        transposed.resize(of.len(), 0.0);
        // In squares, so that both sides stay in the cache.
        const SIDE: usize = 32;
        for top in (0..columns).step_by(SIDE) {
            for side in (0..inner).step_by(SIDE) {
                for i in top..columns.min(top + SIDE) {
                    for j in side..inner.min(side + SIDE) {
                        transposed[j * columns + i] = of[i * inner + j];
                    }
                }
            }
        }
        self.multiply(left, inner, &transposed, columns, out);
        self.transposed = transposed;
    }
}

fn block_product(left: &[[f32; ROWS]], right: &[[f32; COLUMNS]]) -> [[f32; COLUMNS]; ROWS] {
    let mut sums = [[0.0; COLUMNS]; ROWS];
    for (left, right) in left.iter().zip(right) {
        for (sums, factor) in sums.iter_mut().zip(left) {
            for (sum, value) in sums.iter_mut().zip(right) {
                *sum += factor * value;
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// The definition, one element after the other.
    fn naive(left: Left<'_>, inner: usize, right: &[f32], columns: usize, out: &mut [f32]) {
        for (at, out) in out.iter_mut().enumerate() {
            let (i, j) = (at / columns, at % columns);
            *out = 0.0;
            for k in 0..inner {
                *out += left.data[i * left.row + k * left.column] * right[k * columns + j];
            }
        }
    }

    #[test]
    fn blocked_products_are_the_plain_ones_bit_for_bit() {
        let mut random = Random::new(3, 0);
        let mut products = Products::default();
        for (rows, inner, columns) in [(1, 1, 1), (4, 8, 8), (5, 7, 9), (33, 64, 10), (3, 100, 17)]
        {
            let mut draw =
                |count| -> Vec<f32> { (0..count).map(|_| random.signed_unit()).collect() };
            let (a, b) = (draw(rows * inner), draw(inner * columns));
            for (row, column) in [(inner, 1), (1, rows)] {
                let left = Left {
                    data: &a,
                    row,
                    column,
                };
                let (mut expected, mut out) =
                    (vec![0.0; rows * columns], vec![9.0; rows * columns]);
                naive(left, inner, &b, columns, &mut expected);
                products.multiply(left, inner, &b, columns, &mut out);
                assert_eq!(out, expected, "{rows} x {inner} x {columns}");
                // The same right operand, stored by columns.
                let by_columns: Vec<_> = (0..columns)
                    .flat_map(|j| (0..inner).map(move |k| (k, j)))
                    .map(|(k, j)| b[k * columns + j])
                    .collect();
                products.multiply_by_transpose(left, inner, &by_columns, columns, &mut out);
                assert_eq!(out, expected, "transposed, {rows} x {inner} x {columns}");
            }
        }
    }
}
