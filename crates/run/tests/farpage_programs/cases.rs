//! The programs, their inputs and their arguments.
//!
//! The rule it keeps: inputs are generated from seeds, and a program's output is the same in each
//! plain run.

use std::{env, ffi::OsString, fs, io::Write, path::PathBuf, process::Command};

use farpage_testkit::Rng;

/// One thread, if the number of threads would change the order of sums.
pub(crate) const ENVIRONMENT: [(&str, &str); 5] = [
    ("LC_ALL", "C"),
    ("OMP_NUM_THREADS", "1"),
    ("OPENBLAS_NUM_THREADS", "1"),
    ("PYTHONHASHSEED", "0"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
];

const COMPILER: &str = "/usr/bin/g++";

/// Variable with the path of a Python that has the packages.
const PYTHON: &str = "FARPAGE_PYTHON";

const ANALYSIS: &str = include_str!("analysis.py");
const CLIENT: &str = include_str!("client.py");

/// Inputs and outputs of one program.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

#[derive(Clone, Copy)]
enum Input {
    Nothing,
    /// Lines in random order; their number.
    Lines(u64),
    /// Words; their bytes.
    Text(usize),
    /// Fragments of DNA, and the sequence that they come from.
    Reads(usize),
    /// Statements of SQL.
    Table(u64),
    /// Source of a program: the end of its file's name, and the text.
    Source(&'static str, &'static str),
    /// Source of a C++ program, which is compiled to `IN.program`.
    Compiled(&'static str),
}

pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The program and its arguments; `IN` stands for the input, `PY` for Python.
    words: &'static [&'static str],
    input: Input,
    /// A server of its own kind: a client loads it, and prints its contents.
    is_served: bool,
    /// A program that touches all of its memory at random, again and again: it gets no less than a
    /// half, below which it takes minutes.
    is_random: bool,
}

const fn case(name: &'static str, words: &'static [&'static str], input: Input) -> Case {
    Case {
        name,
        words,
        input,
        is_served: false,
        is_random: false,
    }
}

const fn random(case: Case) -> Case {
    Case {
        is_random: true,
        ..case
    }
}

const fn served(name: &'static str, words: &'static [&'static str]) -> Case {
    Case {
        name,
        words,
        input: Input::Nothing,
        is_served: true,
        is_random: false,
    }
}

/// Program of many small objects, or of a virtual machine with a heap of its own, with a source
/// below `sources`.
macro_rules! objects {
    ($name:literal, $end:literal, $($word:literal),+) => {
        case(
            $name,
            &[$($word),+],
            Input::Source($end, include_str!(concat!("sources/objects", $end))),
        )
    };
}

const CASES: [Case; 25] = [
    case(
        "sort",
        &["/usr/bin/sort", "-S", "256M", "--parallel=2", "IN"],
        Input::Lines(1_500_000),
    ),
    case(
        "zstd",
        &[
            "/usr/bin/zstd",
            "-q",
            "-c",
            "--long=31",
            "--single-thread",
            "IN",
        ],
        Input::Text(96 << 20),
    ),
    case(
        "xz",
        &["/usr/bin/xz", "-9", "-T1", "-k", "-c", "IN"],
        Input::Text(400 << 10),
    ),
    // SQLite's pages come from one large allocation.
    case(
        "sqlite3",
        &[
            "/usr/bin/sqlite3",
            "-pagecache",
            "4368",
            "40000",
            ":memory:",
            ".read IN",
        ],
        Input::Table(600_000),
    ),
    served(
        "redis",
        &[
            "/usr/bin/redis-server",
            "--save",
            "",
            "--port",
            "PORT",
            "--daemonize",
            "no",
            "--enable-debug-command",
            "yes",
            "--loglevel",
            "warning",
        ],
    ),
    served(
        "memcached",
        &[
            "/usr/bin/memcached",
            "-u",
            "nobody",
            "-m",
            "400",
            "-U",
            "0",
            "-l",
            "127.0.0.1",
            "-p",
            "PORT",
        ],
    ),
    case(
        "minimap2",
        &[
            "/usr/bin/minimap2",
            "-a",
            "-t",
            "2",
            "-K",
            "8M",
            "IN",
            "IN.reads",
        ],
        Input::Reads(6 << 20),
    ),
    case("numpy", &["PY", "ANALYSIS", "numpy"], Input::Nothing),
    case("duckdb", &["PY", "ANALYSIS", "duckdb"], Input::Nothing),
    case("polars", &["PY", "ANALYSIS", "polars"], Input::Nothing),
    case("pyarrow", &["PY", "ANALYSIS", "pyarrow"], Input::Nothing),
    case(
        "scikit-learn",
        &["PY", "ANALYSIS", "sklearn"],
        Input::Nothing,
    ),
    case("lightgbm", &["PY", "ANALYSIS", "lightgbm"], Input::Nothing),
    case("networkx", &["PY", "ANALYSIS", "networkx"], Input::Nothing),
    objects!("java", ".java", "/usr/bin/java", "-Xmx384m", "IN.java"),
    objects!("node", ".js", "/usr/bin/node", "IN.js"),
    objects!("perl", ".pl", "/usr/bin/perl", "IN.pl"),
    random(objects!("gawk", ".gawk", "/usr/bin/gawk", "-f", "IN.gawk")),
    objects!("r", ".R", "/usr/bin/Rscript", "IN.R"),
    objects!(
        "octave",
        ".m",
        "/usr/bin/octave-cli",
        "-q",
        "--no-history",
        "IN.m"
    ),
    objects!("jq", ".jq", "/usr/bin/jq", "-n", "-f", "IN.jq"),
    objects!("swipl", ".prolog", "/usr/bin/swipl", "IN.prolog"),
    objects!("sbcl", ".lisp", "/usr/bin/sbcl", "--script", "IN.lisp"),
    random(objects!("tclsh", ".tcl", "/usr/bin/tclsh", "IN.tcl")),
    random(case(
        "unordered_map",
        &["IN.program"],
        Input::Compiled(include_str!("sources/objects.cpp")),
    )),
];

pub(crate) fn all() -> impl Iterator<Item = Case> {
    CASES.into_iter()
}

fn python() -> String {
    env::var(PYTHON).unwrap_or_else(|_| "/usr/bin/python3".to_owned())
}

impl Case {
    /// Returns the program's path if it is not on this machine.
    pub(crate) fn missing(&self) -> Option<String> {
        let program = match self.input {
            Input::Compiled(_) => COMPILER.into(),
            _ => self.word(self.words[0], &Folder::new()),
        };
        let program = PathBuf::from(program);
        (!program.exists()).then(|| program.display().to_string())
    }

    /// Returns the number of parts of the memory, one of which is local, of `parts` at most.
    pub(crate) fn parts(&self, parts: u64) -> u64 {
        match self.is_random {
            true => parts.min(2),
            false => parts,
        }
    }

    /// Returns the whole command, with `before` just before the program.
    pub(crate) fn command(&self, before: &[OsString], folder: &Folder) -> Vec<OsString> {
        let mut all = Vec::new();
        if self.is_served {
            let client = folder.file("client.py").into();
            all.extend([python().into(), client, self.name.into()]);
        }
        all.extend_from_slice(before);
        all.extend(self.words.iter().map(|word| self.word(word, folder)));
        all
    }

    fn word(&self, word: &str, folder: &Folder) -> OsString {
        let at = |name| folder.file(name).display().to_string();
        match word {
            "PY" => python().into(),
            "ANALYSIS" => at("analysis.py").into(),
            _ => word.replace("IN", &at("input")).into(),
        }
    }

    /// Writes the input.
    pub(crate) fn prepare(&self, folder: &Folder) {
        fs::write(folder.file("analysis.py"), ANALYSIS).unwrap();
        fs::write(folder.file("client.py"), CLIENT).unwrap();
        let mut seed = Rng(7);
        let mut input = std::io::BufWriter::new(fs::File::create(folder.file("input")).unwrap());
        match self.input {
            Input::Nothing => {}
            Input::Lines(count) => {
                for line in 0..count {
                    writeln!(input, "{:016x} line {line}", seed.next()).unwrap();
                }
            }
            Input::Text(bytes) => input.write_all(&text(&mut seed, bytes)).unwrap(),
            Input::Reads(bytes) => {
                let genome: Vec<u8> = (0..bytes).map(|_| b"ACGT"[seed.below(4)]).collect();
                input.write_all(b">g\n").unwrap();
                input.write_all(&genome).unwrap();
                let reads = fs::File::create(folder.file("input.reads")).unwrap();
                let mut reads = std::io::BufWriter::new(reads);
                for read in 0..1500 {
                    let at = seed.below(bytes - 3000);
                    let mut bases = genome[at..at + 3000].to_vec();
                    for _ in 0..100 {
                        bases[seed.below(3000)] = b"ACGT"[seed.below(4)];
                    }
                    writeln!(reads, ">r{read}").unwrap();
                    reads.write_all(&bases).unwrap();
                    reads.write_all(b"\n").unwrap();
                }
            }
            Input::Table(rows) => {
                let sql = format!(
                    "CREATE TABLE t(id INTEGER PRIMARY KEY, k INTEGER, name TEXT);
                     WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
                     INSERT INTO t SELECT i, i * 7919 % 1000003, hex(i * 104729 % 1000003) || '-of-the-table-' || i FROM n;
                     CREATE INDEX by_k ON t(k);
                     SELECT count(*), sum(k), max(name) FROM t;
                     SELECT k % 17, count(*), min(name) FROM t GROUP BY 1 ORDER BY 1;
                     SELECT a.id, b.name FROM t a JOIN t b ON b.k = a.id WHERE a.id % 97 = 0 ORDER BY a.id;\n"
                );
                input.write_all(sql.as_bytes()).unwrap();
            }
            Input::Source(end, text) => {
                fs::write(folder.file(&format!("input{end}")), text).unwrap();
            }
            Input::Compiled(text) => {
                let (source, program) = (folder.file("input.cpp"), folder.file("input.program"));
                fs::write(&source, text).unwrap();
                let mut compiler = Command::new(COMPILER);
                let compiled = compiler
                    .args(["-O2", "-o"])
                    .arg(program)
                    .arg(source)
                    .status();
                assert!(compiled.unwrap().success(), "the program compiles");
            }
        }
        input.flush().unwrap();
    }
}

/// Makes a text of 20 000 different words, twelve on a line.
fn text(seed: &mut Rng, bytes: usize) -> Vec<u8> {
    let words: Vec<Vec<u8>> = (0..20_000)
        .map(|_| {
            let letters = 3 + seed.below(7);
            (0..letters).map(|_| b'a' + seed.below(26) as u8).collect()
        })
        .collect();
    let mut all = Vec::with_capacity(bytes + 16);
    while all.len() < bytes {
        for at in 0..12 {
            all.extend_from_slice(&words[seed.below(20_000)]);
            all.push(if at == 11 { b'\n' } else { b' ' });
        }
    }
    all.truncate(bytes);
    all
}
