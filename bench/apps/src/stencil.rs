//! Heat in a plate: Jacobi's five-point stencil, [`STEPS`] steps on a grid of [`WIDTH`] columns,
//! whose rim keeps its temperature.
//!
//! Both grids are remote. A step is little work for the bytes that it reads and writes, so a pass
//! over the grids does [`STEPS_PER_PASS`] of them: as soon as three rows of one step are there, a
//! row of the next can be computed, so that only three rows of each step are kept (a wavefront;
//! Wonnacott, "Using time skewing to eliminate idle time due to memory bandwidth and network
//! limitations", 2000). Each block of rows starts its own wavefront some rows early. The kept rows
//! are local and count as local memory.

use anyhow::Result;
use farpage::Advice;

use crate::{
    app::{App, Verdict, random},
    place::Place,
    team::{Team, there_and_back},
};

const WIDTH: usize = 512;
const STEPS: usize = 64;
const STEPS_PER_PASS: usize = 16;
/// Number of rows of a block: two megabytes.
const BLOCK: usize = 512;

type Row = [f64; WIDTH];

pub(crate) struct Stencil {
    rows: usize,
}

impl App for Stencil {
    type On<P: Place> = [P::Array<Row>; 2];
    type Answer = Vec<f64>;

    fn generate(bytes: u64, _: &Team) -> Self {
        let rows = bytes as usize / 2 / size_of::<Row>();
        Self { rows: rows.max(3) }
    }

    fn local_bytes(&self, team: &Team) -> u64 {
        (size_of::<[[Row; 3]; STEPS_PER_PASS - 1]>() * team.threads()) as u64
    }

    fn load<P: Place>(&self, place: &P) -> Result<[P::Array<Row>; 2]> {
        Ok([
            place.array(self.rows, Advice::Sequential)?,
            place.array(self.rows, Advice::Sequential)?,
        ])
    }

    fn reset<P: Place>(&self, [grid, other]: &mut [P::Array<Row>; 2], team: &Team) {
        team.each(other.chunks_mut(BLOCK), |rows| rows.fill([0.0; WIDTH]));
        team.each(grid.chunks_mut(BLOCK).enumerate(), |(block, rows)| {
            for (row, y) in rows.iter_mut().zip(block * BLOCK..) {
                for (x, t) in row.iter_mut().enumerate() {
                    *t = (random(16, (y * WIDTH + x) as u64) >> 40) as f64;
                }
            }
        });
    }

    fn work<P: Place>(&self, [from, to]: &mut [P::Array<Row>; 2], team: &Team) -> Vec<f64> {
        let (mut from, mut to): (&mut [Row], &mut [Row]) = (from, to);
        for pass in 0..STEPS / STEPS_PER_PASS {
            let blocks = to.chunks_mut(BLOCK).enumerate();
            team.fold(
                there_and_back(pass, blocks),
                || vec![[[0.0; WIDTH]; 3]; STEPS_PER_PASS - 1],
                |wavefront, (block, to)| steps(from, block * BLOCK, to, wavefront),
            );
            (from, to) = (to, from);
        }
        // The sum of each row says enough.
        let mut sums = vec![0.0; self.rows];
        team.each(
            sums.chunks_mut(BLOCK).zip(from.chunks(BLOCK)),
            |(sums, rows)| {
                for (sum, row) in sums.iter_mut().zip(rows) {
                    *sum = row.iter().zip(1..).map(|(t, x)| t * f64::from(x)).sum();
                }
            },
        );
        sums
    }

    fn verify<P: Place>(
        &self,
        _: &[P::Array<Row>; 2],
        sums: &Vec<f64>,
        local: &Vec<f64>,
    ) -> Verdict {
        crate::app::verify_bits(sums, local)
    }
}

/// Runs all steps of a pass on the rows from `first`, written to `to`. `wavefront` has the last
/// three rows of each step but the last: row `y` in place `y % 3`.
fn steps(grid: &[Row], first: usize, to: &mut [Row], wavefront: &mut [[Row; 3]]) {
    let rows = grid.len();
    let begin = first.saturating_sub(STEPS_PER_PASS);
    for newest in begin..first + to.len() + STEPS_PER_PASS {
        for step in 1..=STEPS_PER_PASS {
            // Each step is a row behind the step before. At a block's begin, unless that is the
            // plate's, it also has one row less.
            let Some(y) = newest.checked_sub(step).filter(|&y| y < rows) else {
                continue;
            };
            if begin > 0 && y < begin + step {
                continue;
            }
            let (before, after) = wavefront.split_at_mut(step - 1);
            let old = |y: usize| before.last().map_or(&grid[y], |rows| &rows[y % 3]);
            let new = match after.first_mut() {
                Some(rows) => &mut rows[y % 3],
                None if (first..first + to.len()).contains(&y) => &mut to[y - first],
                None => continue,
            };
            if y == 0 || y == rows - 1 {
                *new = *old(y);
            } else {
                average([old(y - 1), old(y), old(y + 1)], new);
            }
        }
    }
}

fn average([above, here, below]: [&Row; 3], to: &mut Row) {
    (to[0], to[WIDTH - 1]) = (here[0], here[WIDTH - 1]);
    for x in 1..WIDTH - 1 {
        to[x] = 0.25 * ((above[x] + below[x]) + (here[x - 1] + here[x + 1]));
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{assert_rejected, team},
        *,
    };
    use crate::place::Local;

    #[test]
    fn blocks_give_what_whole_steps_give_and_a_changed_cell_is_rejected() {
        for rows in [3, 20, 512, 513, 1100] {
            let app = Stencil { rows };
            let mut on = app.load(&Local::default()).unwrap();
            app.reset::<Local>(&mut on, &team());
            let mut now = on[0].to_vec();
            let found = app.work::<Local>(&mut on, &team());
            app.verify::<Local>(&on, &found, &found).unwrap();

            for _ in 0..STEPS {
                let mut next = now.clone();
                for y in 1..rows - 1 {
                    average([&now[y - 1], &now[y], &now[y + 1]], &mut next[y]);
                }
                now = next;
            }
            assert!(now == *on[0], "{rows} rows");

            app.reset::<Local>(&mut on, &team());
            // The rim, whose cells keep what they have.
            on[0][0][5] += 1.0;
            assert_rejected(&app, &mut on, &found);
        }
    }
}
