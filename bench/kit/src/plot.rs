//! Pictures: the parts that all of them share, and bars.
//!
//! The rule it keeps: a picture looks the same on every machine. The font of the PNG is in this
//! program; an SVG names a family that every viewer has.

use std::{ops::RangeInclusive, path::Path, sync::Once};

use anyhow::{Result, anyhow};
use plotters::{
    coord::Shift,
    prelude::*,
    style::{
        FontStyle, register_font,
        text_anchor::{HPos, Pos, VPos},
    },
};

/// Colours that most people tell apart, also with colour-blind eyes: Paul Tol's "muted" scheme.
pub const COLOURS: [RGBColor; 10] = [
    RGBColor(51, 34, 136),
    RGBColor(136, 204, 238),
    RGBColor(68, 170, 153),
    RGBColor(17, 119, 51),
    RGBColor(153, 153, 51),
    RGBColor(221, 204, 119),
    RGBColor(204, 102, 119),
    RGBColor(136, 34, 85),
    RGBColor(170, 68, 153),
    RGBColor(120, 120, 120),
];

/// Font family of all text.
pub const FONT: &str = "sans-serif";

/// Pixels of a PNG for each unit of the drawing: sharp on screens of twice the usual resolution.
const PNG_SCALE: u32 = 2;

/// Makes an SVG. The program that shows it brings the font.
pub fn draw_svg(
    path: &Path,
    size: (u32, u32),
    draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), String>,
) -> Result<()> {
    finish(path, SVGBackend::new(path, size).into_drawing_area(), draw)
}

fn finish<B: DrawingBackend>(
    path: &Path,
    area: DrawingArea<B, Shift>,
    draw: impl FnOnce(&DrawingArea<B, Shift>) -> Result<(), String>,
) -> Result<()> {
    static FONTS: Once = Once::new();
    // Text is measured with this font, whatever is drawn.
    FONTS.call_once(|| {
        for (style, font) in [
            (FontStyle::Normal, dejavu::sans::regular()),
            (FontStyle::Bold, dejavu::sans::bold()),
        ] {
            if register_font(FONT, style, font).is_err() {
                unreachable!("the font in this program is whole");
            }
        }
    });
    area.fill(&WHITE)
        .map_err(|e| e.to_string())
        .and_then(|()| draw(&area))
        .and_then(|()| area.present().map_err(|e| e.to_string()))
        .map_err(|error| anyhow!("cannot write the picture {}: {error}", path.display()))
}

/// Rows of bars: a name, and a value for each series where there is one.
pub type Rows = Vec<(String, Vec<Option<f64>>)>;

/// Horizontal bars: a group of them for each row, one for each series.
#[derive(Default)]
pub struct Bars {
    /// Title above the bars.
    pub title: String,
    /// Findings, below the bars.
    pub caption: String,
    /// Name of the rows' subject, such as `field`.
    pub row: &'static str,
    /// Name of the bars' value, with its unit.
    pub value: &'static str,
    /// Names of the bars of a group.
    pub series: Vec<String>,
    /// Groups of bars.
    pub rows: Rows,
    /// True if the axis is logarithmic.
    pub logarithmic: bool,
    /// Line across all rows: its value and its text.
    pub mark: Option<(f64, &'static str)>,
}

const WIDTH: f64 = 960.0;
const MARGIN: f64 = 18.0;
const BAR: f64 = 12.0;
const GAP: f64 = 10.0;
const LINE: f64 = 18.0;
/// Height at which rows begin: below the title and the names of the series, which have one line.
const TOP: f64 = MARGIN + 34.0 + LINE + 12.0;
/// Width at the right for the figure at the end of the longest bar.
const FIGURE: f64 = 58.0;
const GREY: RGBColor = RGBColor(90, 90, 90);
const PALE: RGBColor = RGBColor(225, 225, 225);

impl Bars {
    /// Writes `<stem>.svg`, `<stem>.png` and `<stem>.csv`.
    pub fn write(&self, stem: &Path) -> Result<()> {
        let path = |extension| stem.with_extension(extension);
        let csv = path("csv");
        std::fs::write(&csv, self.csv())
            .map_err(|error| anyhow!("cannot write {}: {error}", csv.display()))?;
        let height = self.height();
        draw_svg(&path("svg"), (WIDTH as u32, height as u32), |area| {
            self.draw(area, 1.0)
        })?;
        let png = path("png");
        let size = (WIDTH as u32 * PNG_SCALE, height as u32 * PNG_SCALE);
        let area = BitMapBackend::new(&png, size).into_drawing_area();
        finish(&png, area, |area| self.draw(area, PNG_SCALE.into()))
    }

    /// Returns a line for each row, a column for each series.
    fn csv(&self) -> String {
        let field = |text: &str| match text.contains([',', '"']) {
            true => format!("\"{}\"", text.replace('"', "\"\"")),
            false => text.to_owned(),
        };
        let header = self.series.iter();
        let header = header.map(|name| field(&format!("{name}: {}", self.value)));
        let header: Vec<String> = [field(self.row)].into_iter().chain(header).collect();
        let mut csv = header.join(",") + "\n";
        for (name, values) in &self.rows {
            csv += &field(name);
            for value in values {
                csv += &value.map_or(",".to_owned(), |value| format!(",{value:.6}"));
            }
            csv.push('\n');
        }
        csv
    }

    fn row_height(&self) -> f64 {
        BAR * self.series.len() as f64 + GAP
    }

    fn height(&self) -> f64 {
        let rows = self.row_height() * self.rows.len() as f64;
        TOP + rows + 56.0 + LINE * self.caption_lines().len() as f64 + MARGIN
    }

    /// Breaks the caption where it would not fit: characters of this size are about 6.9 wide.
    fn caption_lines(&self) -> Vec<String> {
        let fits = ((WIDTH - 2.0 * MARGIN) / 6.9) as usize;
        let mut lines: Vec<String> = Vec::new();
        for word in self.caption.split_whitespace() {
            let has_room =
                |line: &&mut String| line.chars().count() + 1 + word.chars().count() <= fits;
            match lines.last_mut().filter(has_room) {
                Some(line) => *line += &format!(" {word}"),
                None => lines.push(word.to_owned()),
            }
        }
        lines
    }

    /// Returns the values that the axis has to show.
    fn values(&self) -> impl Iterator<Item = f64> {
        let values = self.rows.iter().flat_map(|(_, values)| values).flatten();
        values
            .copied()
            .chain(self.mark.map(|(value, _)| value))
            .filter(|value| !self.logarithmic || *value > 0.0)
    }

    fn axis(&self) -> Axis {
        let most = self.values().fold(f64::MIN_POSITIVE, f64::max);
        match self.logarithmic {
            true => Axis::logarithmic(self.values().fold(most, f64::min), most),
            false => Axis::linear(most),
        }
    }

    /// Draws everything, in units of `scale` pixels.
    fn draw<B: DrawingBackend>(
        &self,
        area: &DrawingArea<B, Shift>,
        scale: f64,
    ) -> Result<(), String> {
        let pen = Pen { area, scale };
        let longest = self.rows.iter().map(|(name, _)| name.chars().count()).max();
        let left = MARGIN + 7.6 * longest.unwrap_or(0) as f64 + 12.0;
        let right = WIDTH - MARGIN - FIGURE;
        let (top, row_height) = (TOP, self.row_height());
        let bottom = top + row_height * self.rows.len() as f64;
        let axis = self.axis();
        let x = |value: f64| left + (right - left) * axis.place(value);

        // 1. The title and the legend.
        let bold = (19.0, &BLACK, FontStyle::Bold);
        pen.text(&self.title, (MARGIN, MARGIN + 8.0), HPos::Left, bold)?;
        let (mut at, y) = (MARGIN, MARGIN + 36.0);
        for (name, colour) in self.series.iter().zip(COLOURS.iter().cycle()) {
            pen.rectangle((at, y - 5.0), (at + 12.0, y + 5.0), colour)?;
            pen.label(name, (at + 17.0, y), HPos::Left, 13.0)?;
            at += 30.0 + 7.4 * name.chars().count() as f64;
        }

        // 2. The axis.
        for (value, name) in axis.ticks() {
            pen.line((x(value), top), (x(value), bottom), &PALE, 1.0)?;
            pen.label(&name, (x(value), bottom + 12.0), HPos::Center, 12.0)?;
        }
        let (middle, below) = ((left + right) / 2.0, bottom + 32.0);
        pen.label(self.value, (middle, below), HPos::Center, 13.0)?;
        pen.label(self.row, (left - 8.0, below), HPos::Right, 13.0)?;

        // 3. The bars.
        for (at, (name, values)) in self.rows.iter().enumerate() {
            let row = top + row_height * at as f64 + GAP / 2.0;
            let middle = row + BAR * self.series.len() as f64 / 2.0;
            let black = (13.0, &BLACK, FontStyle::Normal);
            pen.text(name, (left - 8.0, middle), HPos::Right, black)?;
            for ((at, value), colour) in values.iter().enumerate().zip(COLOURS.iter().cycle()) {
                let y = row + BAR * at as f64;
                let (end, figure) = match value {
                    Some(value) => (x(*value), figure(*value)),
                    None => (left, "-".to_owned()),
                };
                pen.rectangle((left, y + 0.5), (end, y + BAR - 0.5), colour)?;
                let at = (end + 4.0, y + BAR / 2.0 + 1.0);
                pen.label(&figure, at, HPos::Left, 10.5)?;
            }
        }
        pen.line((left, top), (left, bottom), &BLACK, 1.0)?;
        if let Some((value, name)) = self.mark {
            pen.line((x(value), top - 4.0), (x(value), bottom), &RED, 1.5)?;
            let red = (12.0, &RED, FontStyle::Normal);
            pen.text(name, (x(value), top - 11.0), HPos::Center, red)?;
        }

        // 4. The caption.
        for (line, text) in self.caption_lines().iter().enumerate() {
            let y = bottom + 60.0 + LINE * line as f64;
            pen.label(text, (MARGIN, y), HPos::Left, 12.5)?;
        }
        Ok(())
    }
}

/// Map from values to places between 0 and 1.
struct Axis {
    from: f64,
    to: f64,
    logarithmic: bool,
}

impl Axis {
    fn linear(most: f64) -> Self {
        let step = nice_step(most);
        Self {
            from: 0.0,
            to: (most / step).ceil() * step,
            logarithmic: false,
        }
    }

    /// Makes an axis from a round number below `least` to one that is not below `most`.
    fn logarithmic(least: f64, most: f64) -> Self {
        let about = |value: f64| {
            let decade = value.log10().floor() as i32;
            round_numbers(decade - 1..=decade + 1, &[1.0, 2.0, 5.0])
        };
        // The shortest bar has to be seen.
        let from = about(least).rfind(|&number| number < 0.95 * least);
        let to = about(most).find(|&number| number >= most);
        Self {
            from: from.unwrap_or(least).log10(),
            to: to.unwrap_or(most).log10(),
            logarithmic: true,
        }
    }

    fn place(&self, value: f64) -> f64 {
        let at = match self.logarithmic {
            true => value.max(f64::MIN_POSITIVE).log10(),
            false => value,
        };
        ((at - self.from) / (self.to - self.from)).clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<(f64, String)> {
        let values: Vec<f64> = if self.logarithmic {
            // Within a few decades there is room for the numbers between powers of ten.
            let is_long = self.to - self.from > 3.0;
            let digits: &[f64] = if is_long { &[1.0] } else { &[1.0, 2.0, 5.0] };
            round_numbers(self.from.floor() as i32..=self.to.ceil() as i32, digits)
                .filter(|value| (self.from - 1e-9..=self.to + 1e-9).contains(&value.log10()))
                .collect()
        } else {
            let step = nice_step(self.to);
            let count = (self.to / step).round() as i32;
            (0..=count).map(|at| step * f64::from(at)).collect()
        };
        let ticks = values.into_iter().map(|value| (value, figure(value)));
        ticks.collect()
    }
}

/// Returns `digits` times powers of ten, ascending.
fn round_numbers(
    decades: RangeInclusive<i32>,
    digits: &[f64],
) -> impl DoubleEndedIterator<Item = f64> {
    decades.flat_map(move |decade| digits.iter().map(move |digit| digit * 10f64.powi(decade)))
}

/// Returns 1, 2 or 5 times a power of ten, so that four to eight steps reach `most`.
fn nice_step(most: f64) -> f64 {
    let rough = most / 8.0;
    let power = 10f64.powf(rough.log10().floor());
    let digit = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .find(|digit| digit * power >= rough);
    digit.unwrap_or(10.0) * power
}

/// Formats `value` with three digits, or four that begin with a one, and without trailing zeros.
pub(crate) fn figure(value: f64) -> String {
    let digits = match value.abs() {
        x if x >= 199.95 || x == 0.0 => 0,
        x if x >= 9.995 => 1,
        x if x >= 0.1 => 2,
        _ => 4,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Pen whose units are `scale` pixels.
struct Pen<'a, B: DrawingBackend> {
    area: &'a DrawingArea<B, Shift>,
    scale: f64,
}

impl<B: DrawingBackend> Pen<'_, B> {
    fn at(&self, (x, y): (f64, f64)) -> (i32, i32) {
        let pixels = |units: f64| (units * self.scale).round() as i32;
        (pixels(x), pixels(y))
    }

    fn line(
        &self,
        from: (f64, f64),
        to: (f64, f64),
        colour: &RGBColor,
        width: f64,
    ) -> Result<(), String> {
        let style = colour.stroke_width((width * self.scale).round() as u32);
        let line = PathElement::new(vec![self.at(from), self.at(to)], style);
        self.area.draw(&line).map_err(|e| e.to_string())
    }

    fn rectangle(&self, from: (f64, f64), to: (f64, f64), colour: &RGBColor) -> Result<(), String> {
        let rectangle = Rectangle::new([self.at(from), self.at(to)], colour.filled());
        self.area.draw(&rectangle).map_err(|e| e.to_string())
    }

    /// Draws grey text about the height of `at`.
    fn label(&self, text: &str, at: (f64, f64), side: HPos, size: f64) -> Result<(), String> {
        self.text(text, at, side, (size, &GREY, FontStyle::Normal))
    }

    fn text(
        &self,
        text: &str,
        at: (f64, f64),
        side: HPos,
        (size, colour, style): (f64, &RGBColor, FontStyle),
    ) -> Result<(), String> {
        let style = FontDesc::new(FontFamily::Name(FONT), size * self.scale, style)
            .color(colour)
            .pos(Pos::new(side, VPos::Center));
        let text = Text::new(text.to_owned(), self.at(at), style);
        self.area.draw(&text).map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bars(logarithmic: bool) -> Bars {
        Bars {
            title: "Bytes".into(),
            caption: "Fewer <bytes> & more. ".repeat(20),
            row: "data set",
            value: "ratio (x)",
            series: vec!["raw".into(), "lz4".into()],
            rows: vec![
                ("one, two".into(), vec![Some(1.0), Some(0.5)]),
                ("three".into(), vec![None, Some(250.0)]),
            ],
            logarithmic,
            mark: Some((1.0, "raw size")),
        }
    }

    #[test]
    fn a_picture_has_everything_in_all_three_forms() {
        for logarithmic in [false, true] {
            let stem = std::env::temp_dir()
                .join(format!("farpage-plot-{}-{logarithmic}", std::process::id()));
            bars(logarithmic).write(&stem).unwrap();
            let read = |extension| {
                let path = stem.with_extension(extension);
                let bytes = std::fs::read(&path).unwrap();
                std::fs::remove_file(&path).unwrap();
                bytes
            };
            let (svg, png, csv) = (read("svg"), read("png"), read("csv"));
            let svg = String::from_utf8(svg).unwrap();
            let names = ["data set", "ratio (x)", "raw size"];
            for expected in names.into_iter().chain(["lz4", "three", "&lt;bytes&gt;"]) {
                assert!(svg.contains(expected), "{expected} is missing in\n{svg}");
            }
            assert!(png.starts_with(b"\x89PNG"));
            assert_eq!(
                String::from_utf8(csv).unwrap(),
                "data set,raw: ratio (x),lz4: ratio (x)\n\"one, two\",1.000000,0.500000\nthree,,250.000000\n"
            );
        }
        bars(false).write(Path::new("/nonexistent/x")).unwrap_err();
    }

    #[test]
    fn axes_have_round_numbers_and_hold_every_value() {
        for (axis, expected) in [
            (Axis::linear(7.3), "0 1 2 3 4 5 6 7 8"),
            (Axis::logarithmic(0.3, 4.0), "0.2 0.5 1 2 5"),
            (Axis::logarithmic(0.01, 2000.0), "0.01 0.1 1 10 100 1000"),
        ] {
            let names: Vec<_> = axis.ticks().into_iter().map(|(_, name)| name).collect();
            assert_eq!(names.join(" "), expected);
        }
        let axis = Axis::logarithmic(0.11, 10.0);
        assert!((axis.place(1.0) - 0.5).abs() < 1e-9);
        assert_eq!(Axis::linear(8.0).place(2.0), 0.25);
    }
}
