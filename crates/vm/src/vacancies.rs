//! Vacant slots of a frame pool, kept so that neighbours are found together.
//!
//! The rule it keeps: taking and giving back cost the same however many slots there are and however
//! they are taken, and giving back never allocates. The slots' content is the pool's business.
//!
//! Slots are bits of 64-bit words, and a run is sought inside one word. Words are in lists by the
//! length of their longest vacant run, and a bit per list says whether it has any: the list that
//! fits best is one `trailing_zeros` away. The word last given back to comes first and words that
//! were never used come last, so that few page tables are in use and those are cached. The
//! downside: a run across two words is not found.

/// Number of slots in a word, and in the longest run.
pub(crate) const WORD_SLOTS: u32 = u64::BITS;

/// End of a list.
const NONE: u32 = u32::MAX;

/// Vacant slots of one pool.
pub(crate) struct Vacancies {
    /// Words used so far; room for all is reserved.
    words: Vec<VacancyWord>,
    /// First word of the list for each length of a longest vacant run, from 1 on.
    heads: [u32; WORD_SLOTS as usize],
    /// Bit `n` is set if there are words whose longest vacant run is of `n + 1` slots.
    lengths: u64,
    slots: u32,
    /// Number of slots that may still be taken: less than are vacant, so that runs are left.
    left: u32,
}

struct VacancyWord {
    /// Bits of the slots, set while vacant.
    vacant: u64,
    /// Neighbours in the list of the word's length.
    previous: u32,
    next: u32,
}

impl Vacancies {
    /// Makes `slots` vacant slots, of which at most `taken_max` are taken at once.
    pub(crate) fn new(slots: u32, taken_max: u32) -> Self {
        Self {
            words: Vec::with_capacity(slots.div_ceil(WORD_SLOTS) as usize),
            heads: [NONE; WORD_SLOTS as usize],
            lengths: 0,
            slots,
            left: taken_max,
        }
    }

    /// Takes `wanted` slots next to each other or, where these are not to be had, as many as there
    /// are, but not fewer than `at_least`. Returns the first slot and their number.
    pub(crate) fn take(&mut self, wanted: u32, at_least: u32) -> Option<(u32, u32)> {
        let wanted = wanted.min(WORD_SLOTS).min(self.left);
        if wanted == 0 || wanted < at_least {
            return None;
        }
        while self.lengths >> (wanted - 1) == 0 && self.open_word() {}
        let fitting = self.lengths >> (wanted - 1);
        let longest = if fitting != 0 {
            wanted + fitting.trailing_zeros()
        } else {
            u64::BITS - self.lengths.leading_zeros()
        };
        let count = wanted.min(longest);
        if count == 0 || count < at_least {
            return None;
        }
        let index = self.heads[longest as usize - 1];
        let word = &self.words[index as usize];
        let (first, _) = runs(word.vacant)
            .find(|&(_, len)| len >= count)
            .expect("a word is in the list of its longest run");
        self.change(index, word.vacant & !mask(first, count));
        self.left -= count;
        Some((index * WORD_SLOTS + first, count))
    }

    /// Gives back slots that were taken.
    pub(crate) fn give_back(&mut self, first: u32, count: u32) {
        self.left += count;
        let end = first + count;
        let mut at = first;
        while at < end {
            let (index, bit) = (at / WORD_SLOTS, at % WORD_SLOTS);
            let here = (end - at).min(WORD_SLOTS - bit);
            let vacant = self.words[index as usize].vacant;
            debug_assert_eq!(vacant & mask(bit, here), 0, "slots given back twice");
            self.change(index, vacant | mask(bit, here));
            at += here;
        }
    }

    /// Adds a word that was never used, if there is one left.
    fn open_word(&mut self) -> bool {
        let index = self.words.len() as u32;
        let slots = (self.slots - (index * WORD_SLOTS).min(self.slots)).min(WORD_SLOTS);
        if slots == 0 {
            return false;
        }
        self.words.push(VacancyWord {
            vacant: 0,
            previous: NONE,
            next: NONE,
        });
        self.change(index, mask(0, slots));
        true
    }

    /// Sets a word's vacant slots and puts it first in the list where it belongs then.
    fn change(&mut self, index: u32, vacant: u64) {
        let word = &mut self.words[index as usize];
        let before = longest(std::mem::replace(&mut word.vacant, vacant));
        let after = longest(vacant);
        if before == after {
            return;
        }
        let (previous, next) = (word.previous, word.next);
        if before > 0 {
            let list = before as usize - 1;
            if next != NONE {
                self.words[next as usize].previous = previous;
            }
            if previous != NONE {
                self.words[previous as usize].next = next;
            } else {
                self.heads[list] = next;
                if next == NONE {
                    self.lengths &= !(1 << list);
                }
            }
        }
        if after > 0 {
            let list = after as usize - 1;
            let next = std::mem::replace(&mut self.heads[list], index);
            if next != NONE {
                self.words[next as usize].previous = index;
            }
            self.lengths |= 1 << list;
            let word = &mut self.words[index as usize];
            (word.previous, word.next) = (NONE, next);
        }
    }
}

/// Returns `count` set bits, at least one, from `first` on.
fn mask(first: u32, count: u32) -> u64 {
    (u64::MAX >> (u64::BITS - count)) << first
}

/// Returns the runs of set bits: the first bit and the length of each.
fn runs(bits: u64) -> impl Iterator<Item = (u32, u32)> {
    let mut rest = bits;
    std::iter::from_fn(move || {
        let first = rest.trailing_zeros();
        let len = rest.checked_shr(first)?.trailing_ones();
        rest &= !mask(first, len);
        Some((first, len))
    })
}

fn longest(bits: u64) -> u32 {
    runs(bits).map(|(_, len)| len).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a number below `end` by xorshift64 (Marsaglia, 2003).
    fn below(state: &mut u64, end: u32) -> u32 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state % u64::from(end)) as u32
    }

    /// Returns the naive model's longest run of vacant slots that lies inside one word.
    fn longest_in_model(taken: &[bool]) -> u32 {
        taken
            .chunks(WORD_SLOTS as usize)
            .flat_map(|word| word.split(|&taken| taken))
            .map(|run| run.len() as u32)
            .max()
            .unwrap_or(0)
    }

    #[test]
    fn as_a_naive_model_that_looks_at_every_slot() {
        for seed in 1..=40u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let slots = 1 + below(&mut state, 400);
            // Sometimes all may be taken, so that the lack of runs shows.
            let taken_max = if seed % 2 == 0 {
                slots
            } else {
                slots.div_ceil(2)
            };
            let mut vacancies = Vacancies::new(slots, taken_max);
            let mut model = vec![false; slots as usize];
            let mut held: Vec<(u32, u32)> = Vec::new();
            for _ in 0..4000 {
                let wanted = 1 + below(&mut state, 70);
                if below(&mut state, 2) == 0 {
                    let left = taken_max - model.iter().filter(|&&taken| taken).count() as u32;
                    let possible = longest_in_model(&model).min(left);
                    let exact = below(&mut state, 4) == 0;
                    let at_least = if exact { wanted } else { 1 };
                    let expected = wanted.min(possible);
                    match vacancies.take(wanted, at_least) {
                        None => assert!(expected < at_least, "seed {seed}: {expected} not found"),
                        Some((first, count)) => {
                            assert_eq!(count, expected, "seed {seed}");
                            let range = first as usize..(first + count) as usize;
                            assert!(model[range.clone()].iter().all(|&taken| !taken));
                            model[range].fill(true);
                            held.push((first, count));
                        }
                    }
                } else if !held.is_empty() {
                    // Gives back all of a run, its first part, or the run with its neighbour.
                    let index = below(&mut state, held.len() as u32) as usize;
                    let (first, mut count) = held.swap_remove(index);
                    match below(&mut state, 3) {
                        0 if count > 1 => {
                            let part = 1 + below(&mut state, count - 1);
                            held.push((first + part, count - part));
                            count = part;
                        }
                        1 => {
                            if let Some(behind) = held.iter().position(|run| run.0 == first + count)
                            {
                                count += held.swap_remove(behind).1;
                            }
                        }
                        _ => {}
                    }
                    vacancies.give_back(first, count);
                    model[first as usize..(first + count) as usize].fill(false);
                }
            }
            for (first, count) in held {
                vacancies.give_back(first, count);
            }
            let again = std::iter::from_fn(|| vacancies.take(1, 1)).count();
            assert_eq!(again as u32, taken_max, "seed {seed}: slots leaked");
        }
    }

    #[test]
    fn used_slots_are_used_again_before_new_ones() {
        let mut vacancies = Vacancies::new(64 * 100, 64 * 50);
        for _ in 0..1000 {
            let runs: Vec<_> = [16, 1, 64, 7, 16]
                .map(|wanted| vacancies.take(wanted, wanted).unwrap())
                .into();
            for (first, count) in runs {
                vacancies.give_back(first, count);
            }
        }
        assert_eq!(vacancies.words.len(), 2);
    }
}
