//! The group-by half of h2o.ai's db-benchmark: questions 1 to 5, 7 and 9 on its table of nine
//! columns, [`K`] = 100.
//!
//! The columns are remote; each question reads those that it names in order. Each thread aggregates
//! into a hash table of its own, and the tables are merged. They are local and count as local
//! memory.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use anyhow::Result;
use farpage::Advice;

use crate::{
    app::{App, Verdict, ensure, random},
    place::Place,
    team::{Team, there_and_back},
};
use farpage_bench_kit::pick::mix;

/// Number of groups of the small key columns; the large ones have rows / K.
const K: u64 = 100;
/// Rows per piece of work: 256 KiB of each column of four bytes.
const PIECE: usize = 1 << 16;
const ROW_BYTES: u64 = 40;
const SEED: u64 = 108;

pub(crate) struct GroupBy {
    rows: usize,
}

/// The table. Strings are codes, as data frames hold categories. `v3` goes in steps of 2^-20 where
/// the original rounds to six digits, so that sums are exact in any order.
pub(crate) struct Columns<P: Place> {
    ids: [P::Array<u32>; 6],
    v1: P::Array<u32>,
    v2: P::Array<u32>,
    v3: P::Array<f64>,
}

/// Digest of each question: the number of groups, and a hash of all of them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Digests(Vec<(u64, u64)>);

impl App for GroupBy {
    type On<P: Place> = Columns<P>;
    type Answer = Digests;

    fn generate(bytes: u64, _: &Team) -> Self {
        let rows = (bytes / ROW_BYTES) as usize;
        Self { rows }
    }

    fn local_bytes(&self, team: &Team) -> u64 {
        // The largest question has rows / K groups; a table is up to twice as large as what it
        // holds, and grows by copying.
        let group_bytes = size_of::<(u64, [f64; 2])>() as u64 + 1;
        3 * self.rows as u64 / K * group_bytes * team.threads() as u64
    }

    fn load<P: Place>(&self, place: &P) -> Result<Columns<P>> {
        let rows = self.rows;
        let column = |seed: u64, values: u64| {
            let mut column = place.array(rows, Advice::Sequential)?;
            for (index, value) in column.iter_mut().enumerate() {
                *value = (random(SEED + seed, index as u64) % values) as u32 + 1;
            }
            anyhow::Ok(column)
        };
        let many = (rows as u64 / K).max(1);
        let mut v3 = place.array(rows, Advice::Sequential)?;
        for (index, value) in v3.iter_mut().enumerate() {
            *value = (random(SEED, index as u64) % (100 << 20)) as f64 / f64::from(1 << 20);
        }
        Ok(Columns {
            ids: {
                let [a, b, c] = [column(1, K)?, column(2, K)?, column(3, many)?];
                [a, b, c, column(4, K)?, column(5, K)?, column(6, many)?]
            },
            v1: column(7, 5)?,
            v2: column(8, 15)?,
            v3,
        })
    }

    fn work<P: Place>(&self, columns: &mut Columns<P>, team: &Team) -> Digests {
        let [id1, id2, id3, id4, _, id6]: [&[u32]; 6] = columns.ids.each_ref().map(|c| &**c);
        let (v1, v2, v3): (&[u32], &[u32], &[f64]) = (&columns.v1, &columns.v2, &columns.v3);
        let pair = |a: &[u32], b: &[u32], row: usize| u64::from(a[row]) << 32 | u64::from(b[row]);
        let one = |a: &[u32], row: usize| u64::from(a[row]);
        let f = |column: &[u32], row: usize| f64::from(column[row]);
        let mut questions = Questions {
            team,
            rows: self.rows,
            digests: Vec::new(),
        };

        // 1. sum v1 by id1
        questions.ask(|row| one(id1, row), |row| [f(v1, row)], add);
        // 2. sum v1 by id1, id2
        questions.ask(|row| pair(id1, id2, row), |row| [f(v1, row)], add);
        // 3. sum v1, mean v3 by id3 (the mean as sum and count)
        let figures = |row: usize| [f(v1, row), v3[row], 1.0];
        questions.ask(|row| one(id3, row), figures, add);
        // 4. mean v1, v2, v3 by id4
        let figures = |row: usize| [f(v1, row), f(v2, row), v3[row], 1.0];
        questions.ask(|row| one(id4, row), figures, add);
        // 5. sum v1, v2, v3 by id6
        let figures = |row: usize| [f(v1, row), f(v2, row), v3[row]];
        questions.ask(|row| one(id6, row), figures, add);
        // 7. max v1 - min v2 by id3
        let figures = |row| [f(v1, row), -f(v2, row) + 16.0];
        questions.ask(|row| one(id3, row), figures, f64::max);
        // 9. regression of v1 on v2 by id2, id4
        let figures = |row| {
            let (x, y) = (f(v1, row), f(v2, row));
            [x, y, x * x, y * y, x * y, 1.0]
        };
        questions.ask(|row| pair(id2, id4, row), figures, add);
        Digests(questions.digests)
    }

    fn verify<P: Place>(&self, _: &Columns<P>, found: &Digests, local: &Digests) -> Verdict {
        ensure(!found.0.is_empty() && found == local, || {
            format!(
                "groups and hashes {:x?}, the local run's are {:x?}",
                found.0, local.0
            )
        })
    }
}

struct Questions<'a> {
    team: &'a Team,
    rows: usize,
    digests: Vec<(u64, u64)>,
}

impl Questions<'_> {
    /// Groups rows by `key`, merges each row's `figures` into those of its group, which start at
    /// zero, and merges the threads' groups.
    fn ask<const N: usize>(
        &mut self,
        key: impl Fn(usize) -> u64 + Sync,
        figures: impl Fn(usize) -> [f64; N] + Sync,
        merge: impl Fn(f64, f64) -> f64 + Sync,
    ) {
        let merge = |into: &mut [f64; N], from: &[f64; N]| {
            for (into, from) in into.iter_mut().zip(from) {
                *into = merge(*into, *from);
            }
        };
        let pass = self.digests.len();
        let pieces = (0..self.rows.div_ceil(PIECE)).map(|p| p * PIECE);
        let tables = self.team.fold(
            there_and_back(pass, pieces),
            Groups::<N>::default,
            |groups, first| {
                for row in first..(first + PIECE).min(self.rows) {
                    let group = groups.entry(key(row)).or_insert([0.0; N]);
                    merge(group, &figures(row));
                }
            },
        );
        let merged = tables
            .into_iter()
            .reduce(|mut all, groups| {
                for (key, figures) in &groups {
                    merge(all.entry(*key).or_insert([0.0; N]), figures);
                }
                all
            })
            .unwrap_or_default();
        self.digests.push(digest(&merged));
    }
}

fn add(a: f64, b: f64) -> f64 {
    a + b
}

/// Returns the number of groups, and a hash of them in any order.
fn digest<const N: usize>(groups: &Groups<N>) -> (u64, u64) {
    let hash = |(key, figures): (&u64, &[f64; N])| {
        figures
            .iter()
            .fold(*key, |hash, figure| mix(hash ^ figure.to_bits()))
    };
    let sum = groups.iter().map(hash).fold(0, u64::wrapping_add);
    (groups.len() as u64, sum)
}

type Groups<const N: usize> = HashMap<u64, [f64; N], BuildHasherDefault<Mix>>;

/// A hasher for keys that are numbers.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers of 64 bits")
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = mix(key);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{
        super::tests::{assert_rejected, ran, team},
        *,
    };

    #[test]
    fn groups_are_those_of_a_loop_and_others_are_rejected() {
        let app = GroupBy::generate(200_000 * ROW_BYTES, &team());
        let (mut on, found) = ran(&app);

        // Question 3 and question 7 by a tree.
        let (mut third, mut seventh) = (BTreeMap::new(), BTreeMap::new());
        for row in 0..app.rows {
            let key = u64::from(on.ids[2][row]);
            let (v1, v2) = (f64::from(on.v1[row]), f64::from(on.v2[row]));
            let group = third.entry(key).or_insert([0.0; 3]);
            *group = [group[0] + v1, group[1] + on.v3[row], group[2] + 1.0];
            let group = seventh.entry(key).or_insert([0.0_f64, 0.0]);
            *group = [group[0].max(v1), group[1].max(16.0 - v2)];
        }
        let (third, seventh) = (third.into_iter().collect(), seventh.into_iter().collect());
        assert_eq!(found.0[2], digest::<3>(&third));
        assert_eq!(found.0[5], digest::<2>(&seventh));

        // One value of one row.
        on.v1[77] += 1;
        assert_rejected(&app, &mut on, &found);
    }
}
