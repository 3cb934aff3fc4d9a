//! Openings of doc comments: an editor shows one comment at a time, so each must name its subject.
//!
//! The rule it keeps: a doc comment opens with a verb (functions) or a noun (the rest). Words that
//! cannot open such a sentence are findings. Whether the comment is true is left to its readers.

use super::{Finding, Said, Source};

/// Words that refer to what stands elsewhere, or begin a clause that stands for a noun.
const WITHOUT_A_SUBJECT: [&str; 58] = [
    "After", "And", "As", "At", "Because", "Before", "Both", "But", "By", "Do", "For", "From",
    "Has", "He", "Here", "How", "If", "In", "Is", "It", "Its", "Nobody", "Not", "Nothing", "Of",
    "On", "Only", "Or", "She", "Since", "So", "Such", "That", "Their", "Them", "Then", "There",
    "These", "They", "This", "Those", "To", "Until", "We", "Were", "What", "When", "Where",
    "Whether", "Which", "While", "Who", "Whoever", "Whom", "Whose", "Why", "With", "Without",
];

pub(super) fn check(file: &Source, said: &[Said<'_>], findings: &mut Vec<Finding>) {
    let docs = said
        .iter()
        .filter_map(|said| Some((said.number, doc(said.text)?)));
    let mut before = None;
    for (number, (kind, text)) in docs {
        let is_first = before != Some((number - 1, kind));
        before = Some((number, kind));
        if let Some(word) = opening(text).filter(|_| is_first) {
            let what = format!("opens with `{word}`: name the subject, by a verb or a noun");
            findings.push(file.finding(number, what));
        }
    }
}

/// Returns the kind of a line of a doc comment, `///` or `//!`, and its text.
fn doc(comment: &str) -> Option<(&str, &str)> {
    let is_doc =
        comment.starts_with("//!") || comment.starts_with("///") && !comment.starts_with("////");
    is_doc.then(|| comment.split_at(3))
}

/// Returns the first word of `text` if no sentence with a subject opens with it.
fn opening(text: &str) -> Option<&str> {
    let text = text.trim_start();
    let end = text.find(|c: char| !c.is_alphabetic() && c != '-');
    let word = &text[..end.unwrap_or(text.len())];
    let is_same = text.starts_with("The same");
    (is_same || WITHOUT_A_SUBJECT.contains(&word)).then_some(word)
}

#[cfg(test)]
mod tests {
    use super::{super::tests, *};

    fn found(text: &str) -> Vec<String> {
        tests::found(check, "a.rs", text)
    }

    #[test]
    fn first_words_of_doc_comments_are_looked_at() {
        let text = "//! Pages.\n//! What follows is free.\n\n/// Whether it is.\nfn a() {}\n";
        let said = "a.rs:4: opens with `Whether`: name the subject, by a verb or a noun";
        assert_eq!(found(text), [said]);
        assert_eq!(found("/// The same as `b`.\nfn a() {}\n").len(), 1);
        assert_eq!(found("//! Pages.\n/// Of pages.\nfn a() {}\n").len(), 1);
    }

    #[test]
    fn plain_comments_strings_and_longer_words_are_free() {
        assert_eq!(found("// It is.\nlet a = \"/// It is.\";\n"), [""; 0]);
        assert_eq!(found("/// In-thread faults.\nfn a() {}\n"), [""; 0]);
        assert_eq!(
            found("/// Items.\n///\n/// It may fail.\nfn a() {}\n"),
            [""; 0]
        );
    }
}
