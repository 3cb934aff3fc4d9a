//! Comments in a program's text.
//!
//! The rule it keeps: text in a string is no comment. The module knows only as much of each
//! language as that takes.

/// Syntax of a language's comments and strings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Syntax {
    Rust,
    /// C and C++.
    C,
    /// TOML, shell, CMake and pkg-config: from `#` to the end of the line.
    Hash,
}

impl Syntax {
    /// Returns the syntax of a file. `None` for an unknown language.
    pub(super) fn of(path: &str, text: &str) -> Option<Syntax> {
        let name = path.rsplit('/').next().unwrap_or_default();
        match name.rsplit_once('.').map(|(_, extension)| extension) {
            Some("rs") => Some(Syntax::Rust),
            Some("c" | "h" | "cpp" | "hpp") => Some(Syntax::C),
            Some("toml" | "sh" | "cmake" | "pc") => Some(Syntax::Hash),
            None if text.starts_with("#!") => Some(Syntax::Hash),
            _ => None,
        }
    }
}

/// Returns for each line the offset of its first comment, or `None`.
pub(super) fn starts(syntax: Syntax, text: &str) -> Vec<Option<usize>> {
    if syntax == Syntax::Hash {
        return text.lines().map(hash_start).collect();
    }
    let mut state = State::Code;
    text.lines()
        .map(|line| {
            let mut start = None;
            state = scan(syntax, line, state, &mut start);
            start
        })
        .collect()
}

/// State at the beginning of a line, as earlier lines have left it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Code,
    /// Inside this number of nested `/* */`; C does not nest them.
    Block(u32),
    Text,
    /// A raw string, which ends with `"` and this number of `#`.
    Raw(usize),
}

fn scan(syntax: Syntax, line: &str, mut state: State, start: &mut Option<usize>) -> State {
    let bytes = line.as_bytes();
    let mut at = 0;
    if matches!(state, State::Block(_)) {
        *start = Some(0);
    }
    while at < bytes.len() {
        let rest = &line.as_bytes()[at..];
        match state {
            State::Block(depth) if rest.starts_with(b"*/") => {
                state = if depth > 1 {
                    State::Block(depth - 1)
                } else {
                    State::Code
                };
                at += 2;
            }
            State::Block(depth) if rest.starts_with(b"/*") && syntax == Syntax::Rust => {
                state = State::Block(depth + 1);
                at += 2;
            }
            State::Text if rest[0] == b'\\' => at += 2,
            State::Text if rest[0] == b'"' => {
                state = State::Code;
                at += 1;
            }
            State::Raw(hashes) if rest[0] == b'"' && hashes_at(&rest[1..]) >= hashes => {
                state = State::Code;
                at += 1 + hashes;
            }
            State::Code if rest.starts_with(b"//") => {
                start.get_or_insert(at);
                return state;
            }
            State::Code if rest.starts_with(b"/*") => {
                start.get_or_insert(at);
                state = State::Block(1);
                at += 2;
            }
            State::Code if rest[0] == b'"' => {
                state = State::Text;
                at += 1;
            }
            State::Code if rest[0] == b'\'' => at += character(rest),
            State::Code if rest[0] == b'r' && syntax == Syntax::Rust && begins_word(bytes, at) => {
                let hashes = hashes_at(&rest[1..]);
                if rest.get(1 + hashes) == Some(&b'"') {
                    state = State::Raw(hashes);
                    at += 1 + hashes;
                }
                at += 1;
            }
            _ => at += 1,
        }
    }
    state
}

fn hashes_at(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|byte| **byte == b'#').count()
}

/// True if the `r` at `at` may begin a raw string: no word precedes it, except the `b` or `c` of
/// such a string.
fn begins_word(bytes: &[u8], at: usize) -> bool {
    let word = |at: usize| bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_';
    at == 0 || !word(at - 1) || matches!(bytes[at - 1], b'b' | b'c') && (at == 1 || !word(at - 2))
}

/// Returns the length of the character that begins here, or 1 for a lifetime or digit separator.
fn character(rest: &[u8]) -> usize {
    let quote = |from: usize| rest.iter().skip(from).position(|byte| *byte == b'\'');
    match rest.get(1) {
        Some(b'\\') => quote(3).map_or(1, |after| after + 4),
        // A character has four bytes at most.
        Some(_) => match quote(2) {
            Some(after) if after < 4 && !rest[1].is_ascii() || after == 0 => after + 3,
            _ => 1,
        },
        None => 1,
    }
}

/// Returns the offset of a line's comment in a language with `#`, which is not in quotes, and
/// begins a word.
fn hash_start(line: &str) -> Option<usize> {
    let mut quote = None;
    let mut before = b' ';
    for (at, byte) in line.bytes().enumerate() {
        match (quote, byte) {
            (None, b'#') if before == b' ' || before == b'\t' => return Some(at),
            (None, b'"' | b'\'') => quote = Some(byte),
            (Some(open), _) if open == byte && before != b'\\' => quote = None,
            _ => {}
        }
        before = byte;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rust(line: &str) -> Option<usize> {
        starts(Syntax::Rust, line)[0]
    }

    #[test]
    fn comments_are_told_from_strings() {
        assert_eq!(rust("let a = 1; // one"), Some(11));
        assert_eq!(rust(r#"let a = "http://x";"#), None);
        assert_eq!(rust(r#"let a = "a \" // b"; // c"#), Some(21));
        assert_eq!(rust(r##"let a = r#"" // no"#; // yes"##), Some(22));
        assert_eq!(rust(r#"let a = br"\"; // yes"#), Some(15));
        assert_eq!(rust("fn f<'a>(x: &'a str) {} // yes"), Some(24));
        assert_eq!(rust(r#"let a = '"'; // yes"#), Some(13));
        assert_eq!(rust(r"let a = '\''; // yes"), Some(14));
        assert_eq!(rust("let a = 'ä'; // yes"), Some(14));
        assert_eq!(starts(Syntax::C, "x = 1'000'000; // yes"), [Some(15)]);
    }

    #[test]
    fn comments_and_strings_go_on_over_lines() {
        let text = "/* a\n b /* c */\n d */ code\ncode\n";
        assert_eq!(
            starts(Syntax::Rust, text),
            [Some(0), Some(0), Some(0), None]
        );
        assert_eq!(starts(Syntax::C, text), [Some(0), Some(0), None, None]);
        assert_eq!(
            starts(Syntax::Rust, "\"a\n// no\n\" // yes"),
            [None, None, Some(2)]
        );
    }

    #[test]
    fn hash_begins_a_comment_as_a_word_of_its_own_outside_quotes() {
        assert_eq!(hash_start("a = 1 # one"), Some(6));
        assert_eq!(hash_start(r##"a = "# no""##), None);
        assert_eq!(hash_start("echo $# ${a#b}"), None);
        assert_eq!(hash_start("# all"), Some(0));
    }
}
