//! Blocks of ZFP and LZ4 from arbitrary bytes: the C libraries touch nothing beside the values, and
//! the result depends on the block alone, so that they read nothing beside it either.
//!
//! The first five bytes choose mode, element and shape.

use farpage_codec::{
    unlz4,
    zfp::{Lengths, Mode, Number, Zfp},
};

/// Modes that the first byte chooses from.
pub const MODES: [Mode; 4] = [
    Mode::Rate(12.0),
    Mode::Precision(20),
    Mode::Accuracy(1e-3),
    Mode::Reversible,
];

const HEADER_BYTES: usize = 5;
/// Number of values on each side of a block's own that must stay as they are.
const GUARD: usize = 64;

/// Decodes the bytes behind the header as a block of each kind.
pub fn run(bytes: &[u8]) {
    let Some((&[mode, element, x, y, z], block)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return;
    };
    let mode = MODES[usize::from(mode) % MODES.len()];
    let lengths = [
        1 + usize::from(x) % 64,
        1 + usize::from(y) % 16,
        1 + usize::from(z) % 8,
    ];
    match element % 4 {
        0 => zfp(mode, lengths, block, -7.25f32, f32::to_bits),
        1 => zfp(mode, lengths, block, -7.25f64, f64::to_bits),
        2 => zfp(mode, lengths, block, -7i32, |it| it),
        _ => zfp(mode, lengths, block, -7i64, |it| it),
    }

    let len: usize = lengths.iter().product();
    let mut plain = vec![0xc3u8; len + 2 * GUARD];
    unlz4(block, &mut plain[GUARD..GUARD + len]);
    assert!(
        plain[..GUARD].iter().all(|&byte| byte == 0xc3)
            && plain[GUARD + len..].iter().all(|&byte| byte == 0xc3),
        "LZ4 wrote beside its {len} bytes"
    );
}

/// Decodes `block` twice: by a coder that is new, and by one whose buffer is full of another block.
fn zfp<N: Number, B: PartialEq>(
    mode: Mode,
    lengths: Lengths,
    block: &[u8],
    guard: N,
    bits: fn(N) -> B,
) {
    let len = lengths.iter().product::<usize>();
    let pieces = [lengths].into_iter();
    let decode = |zfp: &mut Zfp| {
        let mut values = vec![guard; len + 2 * GUARD];
        let decoded = zfp.decode(mode, block, pieces.clone(), &mut values[GUARD..GUARD + len]);
        let beside = values[..GUARD].iter().chain(&values[GUARD + len..]);
        assert!(
            { beside }.all(|&value| bits(value) == bits(guard)),
            "{mode:?} {lengths:?} wrote beside its values"
        );
        decoded.then(|| values.into_iter().map(bits).collect::<Vec<_>>())
    };
    let fresh = decode(&mut Zfp::new(len * size_of::<N>()));
    let mut used = Zfp::new(len * size_of::<N>());
    let noise: Vec<f32> = (0..len * size_of::<N>() / 4)
        .map(|at| (at as f32 * 0.7).sin() * 1e9)
        .collect();
    let all = [[noise.len(), 1, 1]].into_iter();
    used.encode(Mode::Reversible, &noise, all)
        .expect("a buffer for this many bytes holds them in any shape");
    assert!(
        fresh == decode(&mut used),
        "{mode:?} {lengths:?}: what was in the buffer before shows"
    );
}

/// Makes a block of each mode, whole, and one of LZ4.
pub fn seeds() -> Vec<Vec<u8>> {
    let values: Vec<f64> = (0..512).map(|at| (f64::from(at) * 0.05).sin()).collect();
    let mut seeds: Vec<Vec<u8>> = (0u8..)
        .zip(MODES)
        .map(|(number, mode)| {
            let mut zfp = Zfp::new(values.len() * 8);
            let block = zfp
                .encode(mode, &values, [[16, 8, 4]].into_iter())
                .expect("it fits");
            [&[number, 1, 15, 7, 3], block].concat()
        })
        .collect();
    seeds.push(b"\0\0\x10\0\0\x35abc\x03\0\x50defgh".to_vec());
    seeds
}
