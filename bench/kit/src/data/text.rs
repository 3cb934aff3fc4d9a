//! Text: words of a made-up language that are as frequent as real ones. SDRBench has no text; logs
//! and documents look like this.

use super::noise::Noise;
use crate::pick::Picker;

const WORDS: usize = 4096;
const SYLLABLES: [&str; 24] = [
    "ba", "cor", "de", "el", "fi", "gan", "ho", "in", "jo", "ka", "lum", "me", "na", "or", "pe",
    "qui", "ra", "sen", "ti", "ul", "ve", "wi", "xa", "zo",
];

/// Makes `count` bytes of text.
pub(super) fn text(seed: u64, [_, _, count]: [usize; 3]) -> Vec<f64> {
    let mut noise = Noise::new(seed);
    let words: Vec<String> = (0..WORDS)
        .map(|_| {
            let syllables = 1 + noise.below(4);
            (0..syllables)
                .map(|_| SYLLABLES[noise.below(SYLLABLES.len())])
                .collect()
        })
        .collect();
    let mut picker = Picker::new(WORDS as u64, Some(0.99), seed);
    let mut text = String::with_capacity(count + 32);
    while text.len() < count {
        text += &words[picker.pick() as usize];
        text += if noise.below(12) == 0 { ".\n" } else { " " };
    }
    text.bytes().take(count).map(f64::from).collect()
}
