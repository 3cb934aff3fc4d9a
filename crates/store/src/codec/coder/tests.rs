use std::env;

use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use bytemuck::Pod;

use super::*;
use crate::{
    Codec, PageIndex,
    codec::{Element, Layout, ZfpMode, form::Width, plain, zfp::header_of},
};

const SEED: u64 = 7;

fn scheme(codec: &str, element: Element, shape: &[u64]) -> Scheme {
    let codec: Codec = codec.parse().expect("a codec");
    Scheme::new(codec, Layout::new(element, shape)).expect("fits")
}

/// Returns the form to try: raw where an adaptive codec would choose.
fn wish(scheme: &Scheme) -> Form {
    scheme.form().unwrap_or(Form::Raw)
}

/// Encodes a page and decodes it. Returns the outcome and the decoded page.
fn through(coder: &mut Coder, scheme: &Scheme, number: u64, bytes: &[u8]) -> (Encoded, Vec<u8>) {
    let number = PageIndex(number as usize);
    let mut block = vec![0xaa; Coder::bound(bytes.len())];
    let page = Page {
        number,
        bytes,
        hash: plain::hash(bytes, SEED),
        seed: SEED,
    };
    let encoded = coder.encode(scheme, wish(scheme), page, bytes.len() - 64, &mut block);
    let mut back = vec![0x55; bytes.len()];
    match encoded.form {
        Form::Raw => back.copy_from_slice(bytes),
        form => {
            let block = &block[..encoded.bytes as usize];
            coder
                .decode(scheme, form, block, SEED, number, &mut back)
                .expect("it was just encoded");
        }
    }
    assert!(encoded.bytes as usize <= bytes.len());
    assert_eq!(plain::hash(&back, SEED), encoded.hash);
    (encoded, back)
}

fn bytes_of<N: Pod>(values: &[N]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Returns a page of numbers of one kind or another, from smooth to hostile.
fn values(random: &mut ChaCha8Rng, len: usize) -> Vec<f64> {
    let scale = 2f64.powi(random.random_range(-40..40));
    let step = random.random_range(0.0..0.5);
    let mut values: Vec<f64> = (0..len).map(|i| scale * (i as f64 * step).sin()).collect();
    match random.random_range(0..10) {
        0 => values
            .iter_mut()
            .for_each(|value| *value = f64::from_bits(random.random())),
        1 => values
            .iter_mut()
            .for_each(|value| *value *= 1.0 + random.random::<f64>()),
        2 => values
            .iter_mut()
            .for_each(|value| *value = f64::from_bits(random.random::<u64>() >> 12)),
        3 => values.iter_mut().for_each(|value| *value = value.round()),
        4 => {
            let odd = [
                f64::NAN,
                f64::INFINITY,
                f64::NEG_INFINITY,
                f64::MAX,
                f64::MIN,
                f64::MIN_POSITIVE,
                5e-324,
                -0.0,
                1e300,
            ];
            for _ in 0..random.random_range(1..5) {
                values[random.random_range(0..len)] = odd[random.random_range(0..odd.len())];
            }
        }
        5 => values
            .iter_mut()
            .step_by(17)
            .for_each(|value| *value *= 1e12),
        _ => {}
    }
    values
}

/// Every page of every kind meets its bound or loses nothing; `FARPAGE_FUZZ_PAGES` says how
/// many are tried.
#[test]
fn no_page_is_ever_further_off_than_its_bound() {
    let pages = env::var("FARPAGE_FUZZ_PAGES")
        .map_or(20_000, |text| text.parse().expect("a number of pages"));
    let mut random = ChaCha8Rng::seed_from_u64(5);
    let mut coder = Coder::new();
    let (mut lossy, mut declined, mut plain_bytes, mut stored_bytes) = (0u64, 0, 0, 0);
    for number in 0..pages {
        let bound = 10f64.powi(random.random_range(-12..3));
        let row = [0, 16, 30, 100][random.random_range(0..4)];
        let shape = [1000, row, row];
        let double = random.random();
        let element = if double { Element::F64 } else { Element::F32 };
        let scheme = scheme(
            &format!("zfp:accuracy={bound:e}"),
            element,
            &shape[..random.random_range(1..4)],
        );
        let values = values(&mut random, if double { 512 } else { 1024 });
        let singles: Vec<f32> = values.iter().map(|&value| value as f32).collect();
        let bytes = if double {
            bytes_of(&values)
        } else {
            bytes_of(&singles)
        };
        let (encoded, back) = through(&mut coder, &scheme, number, bytes);
        if encoded.form != Form::Zfp {
            assert!(back == bytes, "page {number}: a loss by {:?}", encoded.form);
            assert!(encoded.declined && encoded.error == 0.0);
            declined += 1;
            continue;
        }
        lossy += 1;
        let error = |at: usize| match double {
            true => (values[at] - bytemuck::pod_read_unaligned::<f64>(&back[at * 8..][..8])).abs(),
            false => f64::from(
                (singles[at] - bytemuck::pod_read_unaligned::<f32>(&back[at * 4..][..4])).abs(),
            ),
        };
        let worst = (0..bytes.len() / element.bytes())
            .map(error)
            .fold(0.0, |worst: f64, error| {
                assert!(
                    error <= bound,
                    "page {number}: {error} exceeds {bound} ({scheme:?})"
                );
                worst.max(error)
            });
        assert!(
            (worst - encoded.error).abs() <= 1e-6 * bound,
            "page {number}: {worst}, and {} is told",
            encoded.error
        );
        plain_bytes += bytes.len();
        stored_bytes += encoded.bytes as usize;
    }
    println!(
        "{pages} pages: {lossy} within their bounds in 1/{:.2} of the room, {declined} without loss, 0 violations",
        plain_bytes as f64 / stored_bytes as f64
    );
    assert!(
        lossy > pages / 4 && declined > pages / 20,
        "{lossy} {declined}"
    );
}

#[test]
fn what_zfp_cannot_hold_comes_back_bit_by_bit() {
    let smooth: Vec<f64> = (0..512).map(|i| (f64::from(i) * 0.01).sin()).collect();
    let mut coder = Coder::new();
    for codec in [
        "zfp:accuracy=1e-3",
        "zfp:rate=16",
        "zfp:precision=20",
        "zfp:reversible",
    ] {
        let scheme = scheme(codec, Element::F64, &[]);
        let (encoded, _) = through(&mut coder, &scheme, 0, bytes_of(&smooth));
        assert_eq!(
            (encoded.form, encoded.declined),
            (Form::Zfp, false),
            "{codec}"
        );
        for odd in [
            f64::NAN,
            -f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            f64::MAX,
            1e200,
        ] {
            let mut values = smooth.clone();
            values[77] = odd;
            let (encoded, back) = through(&mut coder, &scheme, 0, bytes_of(&values));
            let finite = odd.is_finite() && codec != "zfp:accuracy=1e-3";
            assert!(
                back == bytes_of(&values) || finite,
                "{codec} {odd}: {encoded:?}"
            );
        }
    }
    let scheme = scheme("zfp:rate=8", Element::I32, &[]);
    let mut values: Vec<i32> = (0..1024).collect();
    assert_eq!(
        through(&mut coder, &scheme, 0, bytes_of(&values)).0.form,
        Form::Zfp
    );
    values[5] = i32::MIN;
    let (encoded, back) = through(&mut coder, &scheme, 0, bytes_of(&values));
    assert_eq!(
        (encoded.form, encoded.declined),
        (Form::Shuffled(Width::Four), true)
    );
    assert!(
        back == bytes_of(&values),
        "integers without headroom lose nothing"
    );
}

#[test]
fn a_page_that_came_back_is_as_its_entry_knows_it() {
    let mut random = ChaCha8Rng::seed_from_u64(9);
    let mut coder = Coder::new();
    for codec in ["zfp:accuracy=1e-4", "zfp:rate=12", "zfp:precision=24"] {
        let scheme = scheme(codec, Element::F64, &[64, 64]);
        for number in 0..50 {
            let values = values(&mut random, 512);
            let (encoded, back) = through(&mut coder, &scheme, number, bytes_of(&values));
            assert_eq!(
                plain::hash(&back, SEED),
                encoded.hash,
                "so it is clean when it leaves again"
            );
        }
    }
}

#[test]
fn two_dimensions_take_less_room_than_one() {
    let field: Vec<f64> = (0..8192)
        .map(|i| (f64::from(i % 64) * 0.1).sin() * (f64::from(i / 64) * 0.1).cos())
        .collect();
    let mut coder = Coder::new();
    let mut stored = |shape: &[u64]| {
        let scheme = scheme("zfp:accuracy=1e-6", Element::F64, shape);
        through(&mut coder, &scheme, 0, bytes_of(&field)).0.bytes
    };
    let (flat, shaped, odd) = (stored(&[]), stored(&[128, 64]), stored(&[2, 64, 64]));
    assert!(shaped * 4 < flat * 3, "{shaped} and {flat}");
    assert_eq!(odd, shaped, "too few planes: rows");
}

#[test]
fn a_page_that_shrinks_is_found_also_after_many_that_do_not() {
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let mut coder = Coder::new();
    for codec in ["lz4", "shuffle8"] {
        let scheme = scheme(codec, Element::F64, &[]);
        let hopeless = |coder: &mut Coder, random: &mut ChaCha8Rng, pages: u32| {
            for _ in 0..pages {
                let page: Vec<u64> = (0..8192).map(|_| random.random()).collect();
                assert_eq!(
                    through(coder, &scheme, 0, bytes_of(&page)).0.form,
                    Form::Raw
                );
            }
        };
        for pages in [1, 20, 100] {
            hopeless(&mut coder, &mut random, pages);
            let page: Vec<u64> = (0..8192).map(|_| random.random_range(0..1000)).collect();
            let (encoded, _) = through(&mut coder, &scheme, 0, bytes_of(&page));
            assert!(encoded.bytes < 32768, "{codec} after {pages}: {encoded:?}");
        }
        // A page of which half shrinks is missed for a while, but not for ever.
        hopeless(&mut coder, &mut random, 10);
        let page: Vec<u64> = (0..8192u64)
            .map(|at| if at < 1024 { at } else { random.random() })
            .collect();
        let found = (0..64)
            .position(|_| through(&mut coder, &scheme, 0, bytes_of(&page)).0.form != Form::Raw);
        assert!(found.is_some(), "{codec}");
    }
}

fn any_scheme() -> impl Strategy<Value = Scheme> {
    let codec = prop::sample::select(vec![
        "lz4",
        "shuffle2",
        "shuffle4",
        "shuffle8",
        "zfp:reversible,f32",
        "zfp:reversible,f64",
        "zfp:reversible,i32",
        "zfp:reversible,i64",
        "zfp:accuracy=1e-3,f32",
        "zfp:rate=9,f64",
        "zfp:precision=12,i32",
        "zfp:rate=7,i64",
    ]);
    (codec, prop::collection::vec(0u64..80, 0..4))
        .prop_map(|(codec, shape)| scheme(codec, Element::of::<u8>(), &shape))
}

/// Generates pages that are compressible in one way or another, at any alignment.
fn any_page() -> impl Strategy<Value = (usize, Vec<u8>)> {
    let bits = prop_oneof![Just(0u32), 1u32..9];
    (
        any::<u64>(),
        bits,
        0usize..8,
        prop::sample::select(vec![4096usize, 8192]),
    )
        .prop_map(|(seed, bits, skew, len)| {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let mask = ((1u32 << bits) - 1) as u8;
            let smooth = |at: usize| bytemuck::bytes_of(&((at / 8) as f64 * 0.01).sin())[at % 8];
            let page = (0..len + skew).map(|at| {
                if bits == 0 {
                    smooth(at)
                } else {
                    random.random::<u8>() & mask
                }
            });
            (skew, page.collect())
        })
}

fn is_lossless(scheme: &Scheme) -> bool {
    !matches!(scheme.plan, FormPlan::Zfp(mode, _) if mode != ZfpMode::Reversible)
}

proptest! {
    #[test]
    fn pages_come_back_from_every_codec(scheme in any_scheme(), (skew, page) in any_page(), number in 0u64..1000) {
        let (encoded, back) = through(&mut Coder::new(), &scheme, number, &page[skew..]);
        if is_lossless(&scheme) || encoded.form != Form::Zfp {
            prop_assert_eq!(&back[..], &page[skew..]);
        }
    }

    #[test]
    fn damaged_blocks_decode_to_something_or_nothing_but_never_out_of_bounds(
        scheme in any_scheme(), (skew, page) in any_page(), at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<prop::sample::Index>(),
    ) {
        let bytes = &page[skew..];
        let mut coder = Coder::new();
        let mut block = vec![0; Coder::bound(bytes.len())];
        let encoded = coder.encode(&scheme, wish(&scheme), Page { number: PageIndex(3), bytes, hash: plain::hash(bytes, SEED), seed: SEED }, bytes.len() - 64, &mut block);
        prop_assume!(encoded.form != Form::Raw);
        block.truncate(encoded.bytes as usize);
        let mut back = vec![0; bytes.len()];
        let at = at.index(block.len());
        block[at] ^= 1 << bit;
        let damaged = coder.decode(&scheme, encoded.form, &block, SEED, PageIndex(3), &mut back);
        prop_assert!(damaged.is_err() || encoded.form != Form::Zfp, "a ZFP block that is not whole is not even decoded");
        // Even with a header that fits, the library must not leave its buffers.
        for len in [block.len(), cut.index(block.len())] {
            let block = &mut block[..len];
            if encoded.form == Form::Zfp && let Some((header, rest)) = block.split_first_chunk_mut() {
                *header = header_of(rest, SEED);
            }
            let _ = coder.decode(&scheme, encoded.form, block, SEED, PageIndex(3), &mut back);
        }
    }

    #[test]
    fn arbitrary_bytes_are_safe_to_decode(scheme in any_scheme(), mut block in prop::collection::vec(any::<u8>(), 0..4096)) {
        let form = match scheme.plan {
            FormPlan::Zfp(..) => Form::Zfp,
            FormPlan::Shuffle(width) => Form::Shuffled(width),
            _ => Form::Lz4,
        };
        if form == Form::Zfp && let Some((header, rest)) = block.split_first_chunk_mut() {
            *header = header_of(rest, SEED);
        }
        let _ = Coder::new().decode(&scheme, form, &block, SEED, PageIndex(1), &mut [0; 4096]);
    }
}
