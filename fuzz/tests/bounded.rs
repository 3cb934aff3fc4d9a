//! Every fuzz target with a bounded number of inputs: its seeds, and seeds with a few changes.
//!
//! The rule it keeps: the inputs are the same in each run unless `FARPAGE_TEST_SEED` says
//! otherwise, and an input that fails is printed.

use std::{
    env,
    panic::{self, AssertUnwindSafe},
};

use farpage_fuzz::{TARGETS, Target};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Runs `inputs` changed seeds of a target after the seeds themselves.
fn bounded(name: &str, inputs: usize) {
    let target = target(name);
    let seed = env::var("FARPAGE_TEST_SEED").map_or(1, |seed| seed.parse().expect("a number"));
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    println!("{name}: {inputs} inputs, FARPAGE_TEST_SEED={seed}");
    let seeds = (target.seeds)();
    seeds.iter().for_each(|input| run(target, input));
    for _ in 0..inputs {
        run(target, &changed(&seeds, &mut random));
    }
}

fn target(name: &str) -> &'static Target {
    const ALL: &[Target] = &TARGETS;
    let found = ALL.iter().find(|target| target.name == name);
    found.expect("a target of this package")
}

fn run(target: &Target, input: &[u8]) {
    let ran = panic::catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    if let Err(panic) = ran {
        println!("{} fails on {input:02x?}", target.name);
        panic::resume_unwind(panic);
    }
}

/// Returns one seed with up to eight changes: bytes set, put in, taken out, and the rest of another
/// seed behind.
fn changed(seeds: &[Vec<u8>], random: &mut ChaCha8Rng) -> Vec<u8> {
    let pick = |random: &mut ChaCha8Rng| seeds[random.random_range(0..seeds.len())].clone();
    let mut bytes = pick(random);
    for _ in 0..random.random_range(1..=8) {
        let at = random.random_range(0..=bytes.len());
        let byte = match random.random_range(0..3) {
            0 => random.random(),
            // Values at which lengths and numbers turn over.
            1 => [0, 1, 0x7f, 0x80, 0xff][random.random_range(0..5)],
            _ => 1 << random.random_range(0..8),
        };
        match random.random_range(0..6) {
            0 => bytes.insert(at, byte),
            1 => bytes.truncate(at),
            2 => {
                let other = pick(random);
                bytes.truncate(at);
                bytes.extend(&other[random.random_range(0..=other.len())..]);
            }
            3 if at < bytes.len() => drop(bytes.remove(at)),
            _ if at < bytes.len() => bytes[at] ^= byte,
            _ => bytes.push(byte),
        }
    }
    bytes
}

#[test]
fn control_frames_from_changed_bytes_survive_being_encoded_again() {
    bounded("wire_control", 200_000);
}

#[test]
fn data_headers_from_changed_bytes_encode_to_themselves() {
    bounded("wire_data", 200_000);
}

#[test]
fn damaged_blocks_are_decoded_within_their_values_and_alone() {
    bounded("codec_blocks", 2_000);
}

#[test]
fn server_outlives_connections_that_say_changed_bytes() {
    bounded("server_connection", 500);
}
