//! The join half of h2o.ai's db-benchmark, the question with two tables of the same size: every row
//! of `left` finds the row of `right` with its key, and their values are put side by side.
//!
//! A Grace hash join (Kitsuregawa and others, 1983), the way to join what does not fit into memory:
//! both tables are first scattered into [`PARTITIONS`] by their keys, in order and to as many
//! places as there are partitions, then joined partition by partition in a hash table that fits
//! into a cache. Tables, partitions and the result are remote.

use anyhow::Result;
use farpage::Advice;

use crate::{
    app::{App, Verdict, ensure, random},
    place::Place,
    team::Team,
};
use farpage_bench_kit::pick::mix;

/// Number of partitions. Each thread writes to as many pages at the same time, which must stay in
/// local memory together.
const PARTITIONS: usize = 64;
/// Rows per piece of work.
const PIECE: usize = 1 << 17;
/// Bytes per row: two columns of each table, and both tables' partitions.
const ROW_BYTES: u64 = 32;
const SEED: u64 = 109;

pub(crate) struct Join {
    /// Number of rows. Keys of `right` are below it; one in ten of `left`'s is not, as in the
    /// original.
    rows: usize,
    /// Every key of `right`, in random order.
    right_keys: Vec<u32>,
}

pub(crate) struct Tables<P: Place> {
    left: [P::Array<u32>; 2],
    right: [P::Array<u32>; 2],
    /// Rows by partition, the key in the upper half, the value in the lower. The left ones become
    /// the result: left's value in the upper half, right's in the lower.
    partitioned: [P::Array<u64>; 2],
}

/// Number of rows of the result, and a hash of them in any order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Joined {
    rows: u64,
    hash: u64,
}

impl App for Join {
    type On<P: Place> = Tables<P>;
    type Answer = Joined;

    fn generate(bytes: u64, team: &Team) -> Self {
        let rows = (bytes / ROW_BYTES) as usize;
        // Ranks of random numbers are a permutation.
        let mut keys: Vec<u64> = (0..rows as u64)
            .map(|key| random(SEED, key) >> 32 << 32 | key)
            .collect();
        team.sort(&mut keys);
        let right_keys = keys.into_iter().map(|key| key as u32).collect();
        Self { rows, right_keys }
    }

    fn local_bytes(&self, team: &Team) -> u64 {
        // A table of pairs, at least half of it empty.
        let slots = (self.rows / PARTITIONS * 2).next_power_of_two();
        (slots * size_of::<u64>() * team.threads()) as u64
    }

    fn load<P: Place>(&self, place: &P) -> Result<Tables<P>> {
        let column = |value: &dyn Fn(usize) -> u32| {
            let mut column = place.array(self.rows, Advice::Sequential)?;
            for (row, place) in column.iter_mut().enumerate() {
                *place = value(row);
            }
            anyhow::Ok(column)
        };
        // Partitions are written at many places, so that read-ahead is of no use. They are touched
        // first, as in local memory, so that pages never written before are not what is measured.
        let partitions = || {
            let mut partitions = place.array(self.rows, Advice::Normal)?;
            partitions.fill(0);
            anyhow::Ok(partitions)
        };
        Ok(Tables {
            left: [column(&|row| self.left_key(row))?, column(&left_value)?],
            right: [
                column(&|row| self.right_keys[row])?,
                column(&|row| right_value(self.right_keys[row]))?,
            ],
            partitioned: [partitions()?, partitions()?],
        })
    }

    fn work<P: Place>(&self, tables: &mut Tables<P>, team: &Team) -> Joined {
        let [left, right] = &mut tables.partitioned;
        let left_parts = scatter(&tables.left[0], &tables.left[1], left, team);
        let right_parts = scatter(&tables.right[0], &tables.right[1], right, team);
        let parts = split(left, &left_parts)
            .into_iter()
            .zip(split(right, &right_parts));
        let joined = team.fold(
            parts,
            || (Table::default(), Joined::default()),
            |(table, joined), (left, right)| table.join(left, right, joined),
        );
        let joined = joined.into_iter().map(|(_, joined)| joined);
        joined.fold(Joined::default(), |all, some| Joined {
            rows: all.rows + some.rows,
            hash: all.hash.wrapping_add(some.hash),
        })
    }

    fn verify<P: Place>(&self, _: &Tables<P>, found: &Joined, _: &Joined) -> Verdict {
        // Row by row: a key says what the right table holds for it.
        let rows = (0..self.rows).filter(|&row| (self.left_key(row) as usize) < self.rows);
        let expected = rows.fold(Joined::default(), |mut expected, row| {
            expected.put(left_value(row), right_value(self.left_key(row)));
            expected
        });
        ensure(*found == expected, || {
            format!("the join gave {found:x?} and had to give {expected:x?}")
        })
    }
}

impl Join {
    fn left_key(&self, row: usize) -> u32 {
        (random(SEED + 1, row as u64) % (self.rows as u64 * 10 / 9)) as u32
    }
}

fn left_value(row: usize) -> u32 {
    random(SEED + 2, row as u64) as u32
}

fn right_value(key: u32) -> u32 {
    random(SEED + 3, u64::from(key)) as u32
}

impl Joined {
    fn put(&mut self, left: u32, right: u32) -> u64 {
        let row = u64::from(left) << 32 | u64::from(right);
        self.rows += 1;
        self.hash = self.hash.wrapping_add(mix(row));
        row
    }
}

/// Spreads neighbouring keys by multiplying. The product's highest bits are the partition, the next
/// ones the slot in a table.
fn spread(key: u32) -> u32 {
    key.wrapping_mul(0x9e37_79b1)
}

fn partition(key: u32) -> usize {
    (spread(key) >> (32 - PARTITIONS.ilog2())) as usize
}

/// Writes keys and values to their partitions. Returns the number of rows of each partition.
fn scatter(keys: &[u32], values: &[u32], to: &mut [u64], team: &Team) -> Vec<usize> {
    // 1. How many rows of each piece go to each partition.
    let mut counts = vec![[0; PARTITIONS]; keys.len().div_ceil(PIECE)];
    team.each(keys.chunks(PIECE).zip(&mut counts), |(keys, counts)| {
        for &key in keys {
            counts[partition(key)] += 1;
        }
    });
    // 2. Each piece gets room of its own in each partition.
    let no_rooms = counts.iter().map(|_| std::array::from_fn(|_| &mut [][..]));
    let mut rooms: Vec<[&mut [u64]; PARTITIONS]> = no_rooms.collect();
    let mut rest = to;
    for partition in 0..PARTITIONS {
        for (rooms, counts) in rooms.iter_mut().zip(&counts) {
            (rooms[partition], rest) = rest.split_at_mut(counts[partition]);
        }
    }
    // 3. Each piece fills its room.
    let pieces = keys.chunks(PIECE).zip(values.chunks(PIECE)).zip(rooms);
    team.each(pieces, |((keys, values), rooms)| {
        let mut rooms = rooms.map(|room| room.iter_mut());
        for (&key, &value) in keys.iter().zip(values) {
            let place = rooms[partition(key)].next().expect("the rows were counted");
            *place = u64::from(key) << 32 | u64::from(value);
        }
    });
    (0..PARTITIONS)
        .map(|partition| counts.iter().map(|counts| counts[partition]).sum())
        .collect()
}

fn split<'a>(mut rows: &'a mut [u64], lens: &[usize]) -> Vec<&'a mut [u64]> {
    let mut take = |&len| {
        let (part, rest) = std::mem::take(&mut rows).split_at_mut(len);
        rows = rest;
        part
    };
    lens.iter().map(&mut take).collect()
}

/// Hash table with open addressing. The key is in a slot's upper half, the value in its lower.
#[derive(Default)]
struct Table(Vec<u64>);

impl Table {
    /// Content of a free slot: no key is that large.
    const FREE: u64 = u64::MAX;

    /// Joins two partitions. The rows of the result take the place of the left ones.
    fn join(&mut self, left: &mut [u64], right: &[u64], joined: &mut Joined) {
        let slots = (right.len() * 2).next_power_of_two().max(2);
        self.0.clear();
        self.0.resize(slots, Self::FREE);
        let shift = 32 - slots.ilog2();
        let first = |key: u32| (spread(key) << PARTITIONS.ilog2() >> shift) as usize;
        for &row in right {
            let mut slot = first((row >> 32) as u32);
            while self.0[slot] != Self::FREE {
                slot = (slot + 1) & (slots - 1);
            }
            self.0[slot] = row;
        }
        let mut results = 0;
        for at in 0..left.len() {
            let (key, value) = (left[at] >> 32, left[at] as u32);
            let mut slot = first(key as u32);
            while self.0[slot] != Self::FREE {
                if self.0[slot] >> 32 == key {
                    left[results] = joined.put(value, self.0[slot] as u32);
                    results += 1;
                    break;
                }
                slot = (slot + 1) & (slots - 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{ran, team},
        *,
    };
    use crate::place::Local;

    #[test]
    fn rows_find_their_keys_and_a_changed_row_is_rejected() {
        let app = Join::generate(300_000 * ROW_BYTES, &team());
        let (mut on, found) = ran(&app);
        let share = found.rows as f64 / app.rows as f64;
        assert!((0.88..0.92).contains(&share), "{found:?}");

        on.right[1][123] ^= 1;
        let wrong = app.work::<Local>(&mut on, &team());
        app.verify::<Local>(&on, &wrong, &wrong).unwrap_err();
        let mut wrong = found.clone();
        wrong.rows -= 1;
        app.verify::<Local>(&on, &wrong, &wrong).unwrap_err();
    }
}
