//! Random texts on which encoders differ, from a seed: for the tests and for the bench `encoders`.
//!
//! A text is made from pieces: characters at the edges of all classes in splits, contractions, look-alikes of added
//! tokens, runs of one character or class (some of thousands of bytes), and slices of real text. The pieces are then
//! cut, repeated, recased and joined.

/// A reproducible random generator (SplitMix64).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which must not be 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(crate) fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }
}

/// Characters and short strings where classes, contractions, normalisers and added tokens change.
const EDGES: &[&str] = &[
    "'s",
    "'S",
    "'t",
    "'re",
    "'VE",
    "'m",
    "'ll",
    "'d",
    "'D",
    "'",
    "''",
    "\u{2019}s",
    "'\u{17f}",
    "'l",
    "'r",
    "\u{212a}",
    "\u{131}",
    "\u{130}",
    "\u{17f}",
    "\u{df}",
    "\u{1e9e}",
    "\u{1c5}",
    "\u{2b0}",
    "\u{aa}",
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\r",
    "\r\n",
    "\n\n",
    " \n",
    "\n ",
    " \n \n  ",
    "\u{b}",
    "\u{c}",
    "\u{85}",
    "\u{a0}",
    "\u{1680}",
    "\u{180e}",
    "\u{2000}",
    "\u{2028}",
    "\u{2029}",
    "\u{202f}",
    "\u{205f}",
    "\u{3000}",
    "\u{200b}",
    "\u{feff}",
    "\u{ad}",
    "\u{0}",
    "\u{1c}",
    "\u{1f}",
    "\u{7f}",
    "\u{300}",
    "\u{301}",
    "\u{327}",
    "\u{338}",
    "\u{345}",
    "e\u{301}",
    "=\u{338}",
    "<\u{338}",
    "\u{212b}",
    "\u{1e9b}\u{323}",
    "\u{fb01}",
    "\u{1100}\u{1161}\u{11a8}",
    "\u{ac00}\u{11a8}",
    "\u{ac01}",
    "\u{903}",
    "\u{93f}",
    "\u{0e33}",
    "\u{0e4d}",
    "0",
    "1",
    "12",
    "123",
    "1234",
    "\u{b2}",
    "\u{2167}",
    "\u{663}",
    "\u{96b}",
    "\u{bd}",
    "\u{3007}",
    "\u{1d7d8}",
    ".",
    ",",
    "!",
    "/",
    "//",
    "\\",
    "-",
    "_",
    "+",
    "<",
    ">",
    "|",
    "\u{2014}",
    "\u{3002}",
    "\u{ff0c}",
    "\u{20ac}",
    "^",
    "`",
    "a",
    "b",
    "Z",
    "the",
    "The",
    "THE",
    "iOS",
    "McX",
    "\u{e9}",
    "\u{c9}",
    "\u{416}",
    "\u{436}",
    "\u{5d0}",
    "\u{645}",
    "\u{4e2d}",
    "\u{6587}",
    "\u{3042}",
    "\u{30ab}",
    "\u{30fc}",
    "\u{1f600}",
    "\u{200d}",
    "\u{fe0f}",
    "\u{1f468}\u{200d}\u{1f469}",
    "\u{1f1e9}\u{1f1ea}",
    "\u{1f3fd}",
    "\u{20e3}",
    "\u{fffd}",
    "\u{e000}",
    "\u{10ffff}",
    "\u{378}",
    "\u{1e4d0}",
    "\u{11f04}",
    "<|endoftext|>",
    "<|endoftext|",
    "|>",
    "<|",
    "<|im_start|>",
    "<|end|>",
    "<tab>",
    "<tab",
    "<unk>",
    "\u{2581}",
    "\u{120}",
    "\u{10a}",
];

/// The content of runs: each is a set of alternatives that are sampled repeatedly.
const RUNS: &[&[&str]] = &[
    &["a"],
    &["Z"],
    &["ab"],
    &["hello"],
    &["Hello"],
    &["a", "b", "c", "d", "e", "r", "s", "t"],
    &["a", "B", "c", "D", "E", "f"],
    &["A", "B", "C"],
    &["\u{4e2d}"],
    &["\u{4e2d}", "\u{56fd}", "\u{4eba}", "\u{7684}", "\u{6587}"],
    &["\u{4e2d}", "a", "A"],
    &["\u{3042}", "\u{30ab}", "\u{30fc}", "\u{6f22}"],
    &["\u{ac00}", "\u{b098}", "\u{11a8}"],
    &["\u{e01}", "\u{e33}", "\u{e48}", "\u{e34}"],
    &["\u{915}", "\u{93f}", "\u{94d}"],
    &["\u{645}", "\u{631}", "\u{64e}"],
    &["\u{430}", "\u{431}", "\u{412}"],
    &["e", "\u{301}"],
    &["\u{301}"],
    &["a", "\u{30a}", "\u{327}"],
    &["1"],
    &["0", "1", "7", "9"],
    &["\u{663}", "\u{664}"],
    &["1", "a"],
    &["-"],
    &["="],
    &["!"],
    &["-", "=", "+"],
    &["/"],
    &["\\"],
    &["'"],
    &["."],
    &["!", "\n"],
    &["/", "\n", "\r"],
    &["\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}"],
    &["\u{1f600}"],
    &["\u{2764}\u{fe0f}\u{200d}\u{1f525}"],
    &["\u{1f1e9}"],
    &["\u{fffd}"],
    &["\u{2014}", "\u{2026}"],
    &["'s"],
    &["'", "s", "t"],
    &["a'"],
    &[" "],
    &["\n"],
    &["\r\n"],
    &[" ", "\n"],
    &["\t"],
    &[" ", "\t", "\u{a0}"],
    &["\u{3000}"],
    &["\u{a0}"],
    &["\u{2028}", " "],
    &["\u{0}"],
    &["\u{200d}"],
    &["\u{e9}", "\u{ff}", "\u{c3}", "\u{b5}"],
];

/// A run of about `bytes` bytes of text that does not end it.
fn run(dice: &mut Dice, bytes: usize, out: &mut String) {
    let from = RUNS[dice.below(RUNS.len())];
    let end = out.len() + bytes;
    while out.len() < end {
        out.push_str(dice.pick(from));
    }
}

/// A slice of `text`, at most `bytes` long.
fn slice<'a>(dice: &mut Dice, text: &'a str, bytes: usize) -> &'a str {
    let mut start = dice.below(text.len() + 1);
    while !text.is_char_boundary(start) {
        start -= 1;
    }
    let mut end = text.len().min(start + dice.below(bytes + 1));
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(start..end).unwrap_or_default()
}

/// Any character: from one of the relevant ranges, or from all.
fn any(dice: &mut Dice) -> char {
    let (first, last) = *dice.pick(&[
        &(0u32, 0x7f),
        &(0x80, 0xff),
        &(0x100, 0x5ff),
        &(0x600, 0x1fff),
        &(0x2000, 0x33ff),
        &(0x3400, 0xffff),
        &(0x1_0000, 0x1_ffff),
        &(0, 0x10_ffff),
    ]);
    let drawn = first + dice.below((last - first + 1) as usize) as u32;
    char::from_u32(drawn).unwrap_or('\u{fffd}')
}

/// A text of some hundred bytes, sometimes of thousands; `corpus` may be empty.
pub(crate) fn text(dice: &mut Dice, corpus: &[String]) -> String {
    let mut out = String::new();
    for _ in 0..=dice.below(8) {
        match dice.below(12) {
            0 => {
                // A long word between neighbours: the main purpose of this file.
                out.push_str(dice.pick(EDGES));
                let bytes = 400 + dice.below(4000);
                run(dice, bytes, &mut out);
                out.push_str(dice.pick(EDGES));
            }
            1..=3 => {
                let bytes = 1 + dice.below(60);
                run(dice, bytes, &mut out);
            }
            4 => (0..dice.below(30)).for_each(|_| out.push(any(dice))),
            5..=7 if !corpus.is_empty() => {
                let from = &corpus[dice.below(corpus.len())];
                out.push_str(slice(dice, from, 400));
            }
            _ => (0..dice.below(20)).for_each(|_| out.push_str(dice.pick(EDGES))),
        }
    }
    for _ in 0..dice.below(4) {
        mutate(dice, &mut out);
    }
    out
}

fn mutate(dice: &mut Dice, text: &mut String) {
    let part = slice(dice, text, 60).to_owned();
    let mut at = dice.below(text.len() + 1);
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    match dice.below(6) {
        0 => text.insert_str(at, dice.pick(EDGES)),
        1 => text.insert_str(at, &part),
        2 => *text = text.replacen(&part, "", 1),
        3 => *text = text.replacen(&part, &part.to_uppercase(), 1),
        4 => *text = text.replacen(&part, &part.replace([' ', '\n'], ""), 1),
        _ => text.truncate(at),
    }
}
