//! [`Codec`]: the encoding that a user asks for, its parameters and its name.
//!
//! The rule it keeps: a codec that makes no sense is refused with a text that says what does.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::element::Element;

farpage_wire::debug_as_display!(CodecError);

/// Encoding of a region's pages on memory servers. In any codec, a page of one repeated 8-byte
/// value needs no slot at all, and a page that does not shrink is stored raw.
///
/// As text, in `FARPAGE_CODEC` and on command lines: `raw`, `lz4`, `shuffle`, `shuffle4`,
/// `zfp:accuracy=1e-6`, `zfp:precision=20`, `zfp:rate=8`, `zfp:reversible`, `adaptive`,
/// `adaptive:accuracy=1e-6`, the latter six also with the element: `zfp:accuracy=1e-6,f32`.
///
/// ```
/// use farpage_store::{Codec, Element, ZfpMode};
///
/// let codec: Codec = "zfp:accuracy=1e-6,f32".parse()?;
/// assert_eq!(codec, Codec::Zfp { mode: ZfpMode::Accuracy(1e-6), element: Some(Element::F32) });
/// assert_eq!(codec.to_string(), "zfp:accuracy=1e-6,f32");
/// # Ok::<(), farpage_store::CodecError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Codec {
    /// Pages are stored as they are.
    #[default]
    Raw,
    /// LZ4 blocks: no loss, for text, indices, sparse and repetitive data.
    Lz4,
    /// The first bytes of all elements, then the second, and so on, as an LZ4 block: no loss, for
    /// numbers whose high bytes are alike.
    Shuffle {
        /// Bytes of one element: 2, 4 or 8. `None`: those of the array's elements.
        element_bytes: Option<u8>,
    },
    /// ZFP (Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays", 2014), for fields of numbers
    /// that are close to their neighbours. A page that ZFP cannot serve (it holds NaN or an
    /// infinity, cannot meet the bound, or does not shrink) is stored without loss, by byte shuffle
    /// and LZ4.
    ///
    /// With the array's shape known, whole rows and planes of a page are compressed as 2-D and 3-D
    /// blocks, which is much better than 1-D.
    ///
    /// # What a program sees of a loss
    ///
    /// A changed page is rounded when it is written back: by an eviction, a flush, or
    /// `Advice::DontNeed`. In memory it keeps its exact values, even after a flush; it has the
    /// rounded ones when it comes back. A page that comes back and leaves unchanged is not written
    /// again, so values never drift. A page that is changed in part is rounded again as a whole:
    /// each write-back of changed data may move each value by up to the bound.
    Zfp {
        /// The precision that ZFP keeps.
        mode: ZfpMode,
        /// The elements of the pages. `None`: the array's elements.
        element: Option<Element>,
    },
    /// The fastest form for the program, chosen for each page while it runs: raw, LZ4, byte shuffle
    /// and LZ4, or ZFP (reversible, or within the bound if there is one). The choice follows the
    /// data and the link, and costs almost nothing where compression does not pay.
    Adaptive {
        /// The largest absolute error of a value, for `f32` and `f64`; [`Zfp`](Self::Zfp) says what
        /// a program sees of it. `None`: no loss.
        accuracy: Option<f64>,
        /// The elements of the pages. `None`: the array's elements.
        element: Option<Element>,
    },
}

/// Precision that ZFP keeps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ZfpMode {
    /// Number of bits per value. The error is not bounded.
    Rate(f64),
    /// Number of bits of each value, 1 to 64, after its block's exponent is taken out. The absolute
    /// error is not bounded.
    Precision(u32),
    /// Largest absolute error of a value, for `f32` and `f64`: every page is decoded and compared
    /// before it is accepted.
    Accuracy(f64),
    /// Every bit is kept.
    Reversible,
}

impl Codec {
    /// Byte shuffle and LZ4 for the array's own elements.
    pub const SHUFFLE: Self = Self::Shuffle {
        element_bytes: None,
    };

    /// The fastest form for the array's own elements, without loss.
    pub const ADAPTIVE: Self = Self::Adaptive {
        accuracy: None,
        element: None,
    };

    /// Returns the codec ZFP for the array's own elements.
    pub const fn zfp(mode: ZfpMode) -> Self {
        Self::Zfp {
            mode,
            element: None,
        }
    }

    /// Checks the codec's parameters, as far as that is possible without an array.
    ///
    /// # Errors
    /// [`CodecError`], saying what the codec accepts.
    pub fn check(self) -> Result<(), CodecError> {
        let wrong = |why: &str| CodecError(format!("codec {self}: {why}"));
        match self {
            Self::Raw | Self::Lz4 => Ok(()),
            Self::Shuffle { element_bytes } => match element_bytes {
                None | Some(2 | 4 | 8) => Ok(()),
                Some(_) => Err(wrong("elements of 2, 4 or 8 bytes can be shuffled")),
            },
            Self::Zfp { mode, element } => {
                match mode {
                    ZfpMode::Rate(bits) if !(bits > 0.0 && bits < 64.0) => {
                        return Err(wrong("the rate is in bits per value, above 0 and below 64"));
                    }
                    ZfpMode::Precision(bits) if !(1..=64).contains(&bits) => {
                        return Err(wrong("the precision is in bits, 1 to 64"));
                    }
                    ZfpMode::Accuracy(bound) if !(bound > 0.0 && bound.is_finite()) => {
                        return Err(wrong(
                            "the accuracy is the largest error allowed, a number above 0; zfp:reversible loses nothing",
                        ));
                    }
                    _ => {}
                }
                element.map_or(Ok(()), |element| self.check_zfp_element(mode, element))
            }
            Self::Adaptive { accuracy, element } => match accuracy {
                None => Ok(()),
                Some(bound) if bound > 0.0 && bound.is_finite() => element
                    .map_or(Ok(()), |element| {
                        self.check_zfp_element(ZfpMode::Accuracy(bound), element)
                    }),
                Some(_) => Err(wrong(
                    "the accuracy is the largest error allowed, a number above 0; without one nothing is lost",
                )),
            },
        }
    }

    pub(super) fn check_zfp_element(
        self,
        mode: ZfpMode,
        element: Element,
    ) -> Result<(), CodecError> {
        let wrong = |why: String| Err(CodecError(format!("codec {self}: {why}")));
        let bits = 8 * element.bytes();
        match (mode, element) {
            (_, Element::Other { bytes }) => wrong(format!(
                "the array's elements are none of f32, f64, i32 and i64 (they have {bytes} bytes): choose lz4 or shuffle for this array, \
                 or say what its bytes are, as in zfp:reversible,f32"
            )),
            (ZfpMode::Accuracy(_), _) if !element.is_float() => wrong(format!(
                "an accuracy is for f32 and f64, not for {element}: choose zfp:precision=BITS, zfp:rate=BITS or zfp:reversible for this array"
            )),
            (ZfpMode::Rate(rate), _) if rate >= bits as f64 => wrong(format!(
                "{element} has {bits} bits, so that this rate saves nothing: choose a lower one"
            )),
            _ => Ok(()),
        }
    }
}

/// Error of a codec whose parameters make no sense, that does not fit an array's elements, or whose
/// name cannot be read. The text says what is accepted.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CodecError(pub(crate) String);

const NAMES: &str = "raw, lz4, shuffle (or shuffle2, shuffle4, shuffle8), zfp:accuracy=ERROR, zfp:precision=BITS, zfp:rate=BITS, zfp:reversible, \
                     adaptive or adaptive:accuracy=ERROR, the last six also with ,f32 ,f64 ,i32 or ,i64";

impl FromStr for Codec {
    type Err = CodecError;

    fn from_str(text: &str) -> Result<Self, CodecError> {
        let unknown = || CodecError(format!("`{text}` is no codec: need {NAMES}"));
        let with_element = |text: &'_ str| match text.split_once(',') {
            None => Ok((text.to_owned(), None)),
            Some((text, name)) => Ok((text.to_owned(), Some(named(name).ok_or_else(unknown)?))),
        };
        let codec = match text {
            "raw" => Self::Raw,
            "lz4" => Self::Lz4,
            _ if text.starts_with("adaptive") => {
                let (text, element) = with_element(text)?;
                let accuracy = match text.strip_prefix("adaptive:accuracy=") {
                    None if text == "adaptive" => None,
                    None => return Err(unknown()),
                    Some(figure) => Some(figure.parse().map_err(|_| unknown())?),
                };
                Self::Adaptive { accuracy, element }
            }
            _ => match (text.strip_prefix("shuffle"), text.strip_prefix("zfp:")) {
                (Some(rest), _) => {
                    let digits = rest.strip_suffix("+lz4").unwrap_or(rest);
                    let element_bytes = match digits {
                        "" => None,
                        digits => Some(digits.parse().map_err(|_| unknown())?),
                    };
                    Self::Shuffle { element_bytes }
                }
                (_, Some(rest)) => {
                    let (mode, element) = with_element(rest)?;
                    let mode = match mode.split_once('=') {
                        None if mode == "reversible" => ZfpMode::Reversible,
                        Some(("accuracy", figure)) => {
                            ZfpMode::Accuracy(figure.parse().map_err(|_| unknown())?)
                        }
                        Some(("precision", figure)) => {
                            ZfpMode::Precision(figure.parse().map_err(|_| unknown())?)
                        }
                        Some(("rate", figure)) => {
                            ZfpMode::Rate(figure.parse().map_err(|_| unknown())?)
                        }
                        _ => return Err(unknown()),
                    };
                    Self::Zfp { mode, element }
                }
                _ => return Err(unknown()),
            },
        };
        codec.check()?;
        Ok(codec)
    }
}

fn named(name: &str) -> Option<Element> {
    [Element::F32, Element::F64, Element::I32, Element::I64]
        .into_iter()
        .find(|element| element.to_string() == name)
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raw => f.write_str("raw"),
            Self::Lz4 => f.write_str("lz4"),
            Self::Shuffle {
                element_bytes: None,
            } => f.write_str("shuffle"),
            Self::Shuffle {
                element_bytes: Some(bytes),
            } => write!(f, "shuffle{bytes}"),
            Self::Zfp { mode, element } => {
                match mode {
                    ZfpMode::Rate(bits) => write!(f, "zfp:rate={bits}")?,
                    ZfpMode::Precision(bits) => write!(f, "zfp:precision={bits}")?,
                    ZfpMode::Accuracy(bound) => write!(f, "zfp:accuracy={bound:e}")?,
                    ZfpMode::Reversible => f.write_str("zfp:reversible")?,
                }
                element.map_or(Ok(()), |element| write!(f, ",{element}"))
            }
            Self::Adaptive { accuracy, element } => {
                f.write_str("adaptive")?;
                if let Some(bound) = accuracy {
                    write!(f, ":accuracy={bound:e}")?;
                }
                element.map_or(Ok(()), |element| write!(f, ",{element}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codecs_come_back_from_their_names() {
        for (text, canonical) in [
            ("raw", "raw"),
            ("lz4", "lz4"),
            ("shuffle", "shuffle"),
            ("shuffle4+lz4", "shuffle4"),
            ("shuffle+lz4", "shuffle"),
            ("shuffle8", "shuffle8"),
            ("zfp:accuracy=0.001", "zfp:accuracy=1e-3"),
            ("zfp:rate=8,f64", "zfp:rate=8,f64"),
            ("zfp:precision=20,i32", "zfp:precision=20,i32"),
            ("zfp:reversible", "zfp:reversible"),
            ("adaptive", "adaptive"),
            ("adaptive,f32", "adaptive,f32"),
            ("adaptive:accuracy=0.5,f64", "adaptive:accuracy=5e-1,f64"),
        ] {
            let codec: Codec = text.parse().expect(text);
            assert_eq!(codec.to_string(), canonical);
            assert_eq!(canonical.parse(), Ok(codec));
        }
    }

    #[test]
    fn names_and_figures_that_make_no_sense_are_refused_with_what_does() {
        for (text, says) in [
            ("", "is no codec: need raw, lz4, shuffle"),
            ("LZ4", "need raw, lz4"),
            ("shuffle3", "2, 4 or 8"),
            ("shuffle999", "is no codec"),
            ("zfp", "is no codec"),
            ("zfp:accuracy", "is no codec"),
            ("zfp:accuracy=-1", "above 0"),
            ("zfp:accuracy=inf", "above 0"),
            ("zfp:accuracy=NaN", "above 0"),
            ("zfp:rate=0", "above 0 and below 64"),
            ("zfp:rate=32,f32", "f32 has 32 bits"),
            ("zfp:precision=65", "1 to 64"),
            ("zfp:accuracy=1e-3,i32", "for f32 and f64"),
            ("zfp:accuracy=1e-3,u8", "is no codec"),
            ("adaptive:accuracy", "is no codec"),
            ("adaptively", "is no codec"),
            ("adaptive:accuracy=0", "above 0"),
            ("adaptive:accuracy=1,i32", "for f32 and f64"),
        ] {
            let error = text.parse::<Codec>().expect_err(text).to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
