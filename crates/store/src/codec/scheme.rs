//! [`Scheme`]: a codec fitted to one array, which a [`Layout`] describes.
//!
//! The rule it keeps: a scheme is made from a codec and a layout alone, so that a program that
//! opens a published region decodes its pages as they were encoded.
//!
//! **Pieces.** ZFP compresses blocks of 4, 4 x 4 or 4 x 4 x 4 values, and the more dimensions the
//! better. A page need not begin where a row or plane begins, so it is cut. Its whole planes are
//! one 3-D piece if there are at least four. Of what is left on either side, whole rows are a 2-D
//! piece if there are at least four. The rest is 1-D. Without a shape, or with rows longer than a
//! quarter of a page, all of it is 1-D. Blocks never span two pages.

use serde::{Deserialize, Serialize};

use super::{
    element::Element,
    form::{Form, Width},
    spec::{Codec, CodecError, ZfpMode},
};
use crate::Elements;

/// Number of bytes before a ZFP block: the low half of its hash.
pub(super) const ZFP_HEADER_BYTES: usize = 8;

/// The shape and the elements of a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Layout {
    /// The array's elements.
    pub element: Element,
    /// Elements per dimension, the slowest first, as in C. Empty: one dimension.
    pub shape: Vec<u64>,
    /// The number and type of a typed array's elements; `None` for bytes without a type.
    pub elements: Option<Elements>,
}

impl Layout {
    /// Makes the layout of an array of this shape.
    pub fn new(element: Element, shape: impl Into<Vec<u64>>) -> Self {
        let shape = shape.into();
        Self {
            element,
            shape,
            elements: None,
        }
    }

    /// Sets the number and type of a typed array's elements.
    pub fn elements(mut self, elements: Elements) -> Self {
        self.elements = Some(elements);
        self
    }
}

impl Default for Layout {
    /// Returns the layout of bytes.
    fn default() -> Self {
        Self::new(Element::Other { bytes: 1 }, [])
    }
}

/// A codec fitted to one array.
#[derive(Clone, Debug)]
pub(crate) struct Scheme {
    pub(crate) codec: Codec,
    pub(crate) layout: Layout,
    pub(super) plan: FormPlan,
}

/// The forms that may be tried on a page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum FormPlan {
    Raw,
    Lz4,
    Shuffle(Width),
    Zfp(ZfpMode, Number),
    Adaptive(Option<Width>, Option<(ZfpMode, Number)>),
}

/// Number types that ZFP can compress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    F32,
    F64,
    I32,
    I64,
}

impl Number {
    fn of(element: Element) -> Option<Self> {
        match element {
            Element::F32 => Some(Self::F32),
            Element::F64 => Some(Self::F64),
            Element::I32 => Some(Self::I32),
            Element::I64 => Some(Self::I64),
            Element::Other { .. } => None,
        }
    }

    pub(super) fn width(self) -> Width {
        match self {
            Self::F32 | Self::I32 => Width::Four,
            Self::F64 | Self::I64 => Width::Eight,
        }
    }
}

impl Scheme {
    /// Fits a codec to an array.
    ///
    /// # Errors
    /// The codec does not fit; the text says which would.
    pub(crate) fn new(codec: Codec, layout: Layout) -> Result<Self, CodecError> {
        codec.check()?;
        let plan = match codec {
            Codec::Raw => FormPlan::Raw,
            Codec::Lz4 => FormPlan::Lz4,
            Codec::Shuffle { element_bytes } => {
                let bytes = element_bytes.map_or(layout.element.bytes(), usize::from);
                FormPlan::Shuffle(Width::of(bytes).ok_or_else(|| {
                    CodecError(format!(
                        "codec {codec}: elements of 2, 4 or 8 bytes can be shuffled, and this array's have {bytes}: choose lz4 for it, \
                         or say what its bytes are, as in shuffle4"
                    ))
                })?)
            }
            Codec::Zfp { mode, element } => {
                let element = element.unwrap_or(layout.element);
                codec.check_zfp_element(mode, element)?;
                FormPlan::Zfp(mode, Number::of(element).expect("checked above"))
            }
            Codec::Adaptive { accuracy, element } => {
                let element = element.unwrap_or(layout.element);
                let mode = accuracy.map_or(ZfpMode::Reversible, ZfpMode::Accuracy);
                if accuracy.is_some() {
                    codec.check_zfp_element(mode, element)?;
                }
                let zfp = Number::of(element).map(|number| (mode, number));
                FormPlan::Adaptive(Width::of(element.bytes()), zfp)
            }
        };
        Ok(Self {
            codec,
            layout,
            plan,
        })
    }

    /// True if all pages are stored as they are.
    pub(crate) fn is_raw(&self) -> bool {
        self.plan == FormPlan::Raw
    }

    /// Returns the form that each page is tried in. `None`: an adaptive codec chooses it.
    pub(crate) fn form(&self) -> Option<Form> {
        match self.plan {
            FormPlan::Raw => Some(Form::Raw),
            FormPlan::Lz4 => Some(Form::Lz4),
            FormPlan::Shuffle(width) => Some(Form::Shuffled(width)),
            FormPlan::Zfp(..) => Some(Form::Zfp),
            FormPlan::Adaptive(..) => None,
        }
    }

    /// True if a page of `page_bytes` can be stored as `stored_bytes` bytes of this form.
    pub(crate) fn allows(&self, form: Form, stored_bytes: usize, page_bytes: usize) -> bool {
        match form {
            Form::Raw => stored_bytes == page_bytes,
            Form::Lz4 | Form::Shuffled(_) => (1..page_bytes).contains(&stored_bytes),
            Form::Zfp => {
                self.zfp().is_some() && (ZFP_HEADER_BYTES..page_bytes).contains(&stored_bytes)
            }
        }
    }

    /// Returns the forms that an adaptive codec chooses from, raw first. `None` for other codecs.
    pub(super) fn candidates(&self) -> Option<Vec<Form>> {
        let FormPlan::Adaptive(width, zfp) = self.plan else {
            return None;
        };
        let all = [Some(Form::Raw), Some(Form::Lz4), width.map(Form::Shuffled)];
        Some(
            all.into_iter()
                .chain([zfp.map(|_| Form::Zfp)])
                .flatten()
                .collect(),
        )
    }

    /// Returns mode and number type of ZFP blocks, if the scheme allows any.
    pub(super) fn zfp(&self) -> Option<(ZfpMode, Number)> {
        match self.plan {
            FormPlan::Zfp(mode, number) => Some((mode, number)),
            FormPlan::Adaptive(_, zfp) => zfp,
            FormPlan::Raw | FormPlan::Lz4 | FormPlan::Shuffle(_) => None,
        }
    }
}

/// Neighbouring elements of a page that are compressed together: lengths of the fastest dimension,
/// the next and the slowest; 1 for a dimension that the piece does not have.
pub(super) type PagePiece = [usize; 3];

/// Upper bound of a page's pieces: rest of a row, rows, planes, rows, start of a row.
pub(super) const PIECES_MAX: usize = 5;

/// Cuts `len` elements from number `first` of an array of this shape into pieces, in the order of
/// memory. See the module.
pub(super) fn pieces(
    shape: &[u64],
    first: u64,
    len: usize,
) -> impl Iterator<Item = PagePiece> + Clone {
    let mut pieces = [[0; 3]; PIECES_MAX];
    let mut count = 0;
    let mut add = |piece: PagePiece| {
        if piece[0] > 0 {
            pieces[count] = piece;
            count += 1;
        }
    };
    let end = first + len as u64;
    // Dimensions beyond the third are more planes.
    let (row, plane) = match *shape {
        [.., rows, row] if row >= 4 && shape.len() > 2 && rows >= 4 => {
            (row, rows.saturating_mul(row))
        }
        [.., _, row] if row >= 4 => (row, u64::MAX),
        _ => (u64::MAX, u64::MAX),
    };
    let planes = whole(first, end, plane);
    let outer = planes.clone().unwrap_or(end..end);
    for part in [first..outer.start, outer.clone(), outer.end..end] {
        if part == outer && planes.is_some() {
            add([
                row as usize,
                (plane / row) as usize,
                ((part.end - part.start) / plane) as usize,
            ]);
            continue;
        }
        let rows = whole(part.start, part.end, row);
        let inner = rows.clone().unwrap_or(part.end..part.end);
        add([(inner.start - part.start) as usize, 1, 1]);
        if rows.is_some() {
            add([row as usize, ((inner.end - inner.start) / row) as usize, 1]);
        }
        add([(part.end - inner.end) as usize, 1, 1]);
    }
    pieces.into_iter().take(count)
}

/// Returns the whole units in `first..end`, if there are at least four.
fn whole(first: u64, end: u64, unit: u64) -> Option<std::ops::Range<u64>> {
    let from = first.checked_next_multiple_of(unit)?;
    let to = end / unit * unit;
    (to.checked_sub(from)? / unit >= 4).then_some(from..to)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(shape: &[u64], first: u64, len: usize) -> Vec<PagePiece> {
        pieces(shape, first, len).collect()
    }

    #[test]
    fn a_page_is_cut_into_whole_planes_whole_rows_and_the_rest() {
        assert_eq!(cut(&[], 0, 1024), [[1024, 1, 1]]);
        assert_eq!(cut(&[1 << 20], 512, 1024), [[1024, 1, 1]]);
        assert_eq!(cut(&[64, 64], 1024, 1024), [[64, 16, 1]]);
        assert_eq!(
            cut(&[100, 100], 1024, 1024),
            [[76, 1, 1], [100, 9, 1], [48, 1, 1]]
        );
        assert_eq!(cut(&[99, 16, 16], 1024, 1024), [[16, 16, 4]]);
        assert_eq!(
            cut(&[99, 12, 12], 1024, 1024),
            [[8, 1, 1], [12, 10, 1], [12, 12, 6], [32, 1, 1]]
        );
        assert_eq!(
            cut(&[9, 99, 12, 12], 1024, 1024),
            cut(&[891, 12, 12], 1024, 1024)
        );
        assert_eq!(cut(&[100, 300], 0, 1024), [[1024, 1, 1]], "no four rows");
        assert_eq!(
            cut(&[1000, 3], 0, 1024),
            [[1024, 1, 1]],
            "rows shorter than a block"
        );
        assert_eq!(cut(&[0, 0, 0], 0, 1024), [[1024, 1, 1]]);
    }

    proptest! {
        #[test]
        fn pieces_cover_the_page(
            shape in prop::collection::vec(0u64..5000, 0..5), page in 0u64..1 << 40, len in 1usize..1 << 18,
        ) {
            let pieces = cut(&shape, page * len as u64, len);
            prop_assert!(pieces.len() <= PIECES_MAX);
            prop_assert_eq!(pieces.iter().map(|[x, y, z]| x * y * z).sum::<usize>(), len);
            prop_assert!(pieces.iter().all(|[x, y, z]| *x > 0 && *y > 0 && *z > 0));
        }
    }
}
