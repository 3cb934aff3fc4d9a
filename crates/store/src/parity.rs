//! [`ParityCode`]: the bytes of a lost extent out of those of others.
//!
//! The rule it keeps: of `data` data extents and `parity` parity extents, any `data` determine all
//! others, byte by byte. The first parity extent is the sum of the data extents in GF(2^8), which
//! is XOR. The second is the sum of each data extent times a power of the field's generator 2: the
//! P and Q of RAID 6 (Anvin, "The mathematics of RAID-6"). Every lost extent is a sum of others,
//! each times a coefficient. So a caller adds one source after the other, and needs one buffer.
//!
//! Own code, since the kept crates for Reed-Solomon codes want all sources in memory at once, and
//! allocate; here a signal handler decodes.

/// Upper bound of the data extents of a set.
pub(crate) const DATA_MAX: usize = 8;
/// Upper bound of the parity extents of a set.
pub(crate) const PARITY_MAX: usize = 2;
/// Upper bound of the extents of a set.
pub(crate) const SET_MAX: usize = DATA_MAX + PARITY_MAX;

/// Numbers of data and parity extents of a set. Extents are numbered, those with data first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ParityCode {
    pub(crate) data: u8,
    pub(crate) parity: u8,
}

/// Position of an extent group in a parity set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Column {
    pub(crate) set: u32,
    pub(crate) at: u8,
}

/// Extent groups that determine one another. Parity extents are groups, too, in which no slot is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParitySet {
    pub(crate) code: ParityCode,
    /// Indices of the groups by position.
    groups: [u32; SET_MAX],
    /// True while the columns get their copies back.
    pub(crate) is_opening: bool,
}

impl ParitySet {
    pub(crate) fn new(code: ParityCode, groups: impl IntoIterator<Item = u32>) -> Self {
        let mut all = [0; SET_MAX];
        for (group, index) in all.iter_mut().zip(groups) {
            *group = index;
        }
        Self {
            code,
            groups: all,
            is_opening: false,
        }
    }

    /// Returns the indices of all groups, those with data first.
    pub(crate) fn groups(&self) -> &[u32] {
        &self.groups[..self.code.extents()]
    }

    /// Returns the indices of the groups that slots are in.
    pub(crate) fn columns(&self) -> &[u32] {
        &self.groups[..usize::from(self.code.data)]
    }

    /// Returns the indices of the groups of parity extents.
    pub(crate) fn parity(&self) -> &[u32] {
        &self.groups()[usize::from(self.code.data)..]
    }
}

impl ParityCode {
    /// Returns the number of extents of a set.
    pub(crate) fn extents(self) -> usize {
        usize::from(self.data + self.parity)
    }

    /// Returns the coefficient of a data extent in an extent.
    pub(crate) fn coefficient(self, at: u8, data: u8) -> u8 {
        match at.checked_sub(self.data) {
            None => u8::from(at == data),
            Some(0) => 1,
            Some(_) => (0..data).fold(1, |power, _| product(power, 2)),
        }
    }

    /// Returns the coefficients that make the extent `lost` the sum of the extents in `sources`, by
    /// position. `None` if `sources`, bits of positions, are not as many as there are data extents.
    pub(crate) fn recipe(self, lost: u8, sources: u16) -> Option<[u8; SET_MAX]> {
        let data = usize::from(self.data);
        if sources.count_ones() as usize != data {
            return None;
        }
        // Gauss-Jordan elimination. An equation for each data extent: the sources' coefficients,
        // and that of the lost extent behind them.
        let mut equations = [[0u8; DATA_MAX + 1]; DATA_MAX];
        for (number, equation) in (0..self.data).zip(&mut equations) {
            let values = positions(sources).map(|at| self.coefficient(at, number));
            equation
                .iter_mut()
                .zip(values)
                .for_each(|(to, value)| *to = value);
            equation[data] = self.coefficient(lost, number);
        }
        for column in 0..data {
            let pivot = (column..data).find(|&row| equations[row][column] != 0)?;
            equations.swap(column, pivot);
            let scale = inverse(equations[column][column]);
            equations[column] = equations[column].map(|value| product(value, scale));
            let pivot = equations[column];
            for (row, equation) in equations[..data].iter_mut().enumerate() {
                let factor = if row == column { 0 } else { equation[column] };
                for (value, &other) in equation.iter_mut().zip(&pivot) {
                    *value ^= product(other, factor);
                }
            }
        }
        let mut recipe = [0; SET_MAX];
        for (at, equation) in positions(sources).zip(&equations) {
            recipe[usize::from(at)] = equation[data];
        }
        Some(recipe)
    }
}

/// Returns the positions in a set of bits.
pub(crate) fn positions(bits: u16) -> impl Iterator<Item = u8> {
    (0..SET_MAX as u8).filter(move |at| bits & (1 << at) != 0)
}

/// Returns the product in GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1.
fn product(a: u8, b: u8) -> u8 {
    let (mut a, mut sum) = (a, 0);
    for bit in 0..8 {
        if b & (1 << bit) != 0 {
            sum ^= a;
        }
        a = (a << 1) ^ if a & 0x80 != 0 { 0x1d } else { 0 };
    }
    sum
}

/// Returns the inverse of a number that is not zero: its 254th power.
fn inverse(a: u8) -> u8 {
    (0..254).fold(1, |power, _| product(power, a))
}

/// Adds `bytes`, each times `coefficient`, to `sum`. Both have one length.
pub(crate) fn add_product(sum: &mut [u8], bytes: &[u8], coefficient: u8) {
    debug_assert_eq!(sum.len(), bytes.len());
    if coefficient == 1 {
        return sum.iter_mut().zip(bytes).for_each(|(to, byte)| *to ^= byte);
    }
    let mut table = [0u8; 256];
    for byte in 1..256usize {
        let lowest = byte & byte.wrapping_neg();
        table[byte] = match byte == lowest {
            true => product(byte as u8, coefficient),
            false => table[byte ^ lowest] ^ table[lowest],
        };
    }
    for (to, &byte) in sum.iter_mut().zip(bytes) {
        *to ^= table[usize::from(byte)];
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// Returns the product by long division of polynomials.
    fn slow_product(a: u8, b: u8) -> u8 {
        let mut sum = (0..8).fold(0u16, |sum, bit| {
            sum ^ if b & (1 << bit) != 0 {
                u16::from(a) << bit
            } else {
                0
            }
        });
        for bit in (8..16).rev() {
            if sum & (1 << bit) != 0 {
                sum ^= 0x11d << (bit - 8);
            }
        }
        sum as u8
    }

    #[test]
    fn products_and_inverses_are_those_of_the_field() {
        for a in 0..=255 {
            for b in 0..=255 {
                assert_eq!(product(a, b), slow_product(a, b), "{a} times {b}");
            }
            assert!(a == 0 || product(a, inverse(a)) == 1, "{a}");
        }
    }

    #[test]
    fn a_sum_is_the_same_as_byte_by_byte() {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        for coefficient in 0..=255 {
            let (mut sum, mut bytes) = (vec![0; 300], vec![0; 300]);
            random.fill_bytes(&mut sum);
            random.fill_bytes(&mut bytes);
            let slow: Vec<u8> = (sum.iter().zip(&bytes))
                .map(|(&to, &byte)| to ^ slow_product(byte, coefficient))
                .collect();
            add_product(&mut sum, &bytes, coefficient);
            assert!(sum == slow, "times {coefficient}");
        }
    }

    /// All codes, with every choice of sources, and every lost extent.
    #[test]
    fn any_data_extents_determine_all_others() {
        let mut random = ChaCha8Rng::seed_from_u64(2);
        for code in (2..=8).flat_map(|data| [1, 2].map(|parity| ParityCode { data, parity })) {
            let extents = code.extents();
            let data: Vec<u8> = (0..code.data).map(|_| random.random()).collect();
            let byte = |at: u8| {
                let parts = (0..code.data).zip(&data);
                parts.fold(0, |sum, (number, &byte)| {
                    sum ^ slow_product(byte, code.coefficient(at, number))
                })
            };
            for sources in 0u16..1 << extents {
                for lost in 0..extents as u8 {
                    let recipe = code.recipe(lost, sources);
                    let is_enough = sources.count_ones() == u32::from(code.data);
                    assert_eq!(recipe.is_some(), is_enough, "{code:?}, {sources:b}");
                    let Some(recipe) = recipe else { continue };
                    let sum = positions(sources).fold(0, |sum, at| {
                        sum ^ slow_product(byte(at), recipe[usize::from(at)])
                    });
                    assert_eq!(sum, byte(lost), "{code:?}: {lost} of {sources:b}");
                }
            }
        }
    }
}
