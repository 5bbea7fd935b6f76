"""Compressive Transformers: Tables 5 to 9, Table 4's comparison, Figures 2, 3, 4 and 6."""

from functools import partial
from itertools import pairwise
from pathlib import Path

from accelerated.lab.reports.frequency import FREQUENCIES
from accelerated.lab.reports.memories import BUCKETS, PARTS
from accelerated.lab.systems.speech import read_aloud
from accelerated.lab.tables.table import CARRIED, CLEARED, GPU, RATES, SMALL, Measure, Ordering, Row, Scale, Table, of_test
from accelerated.lab.trials import product

FACTORS = {"0": 0, "1/2": 0.5, "1": 1, "2": 2, "3": 3, "4": 4}  # Tables 8 and 9: of the compressed memory in evaluation


def sizes(rows: int, lanes: int) -> dict[str, int]:
    """The scale's sizes: M = C = N rows, and what stands beside them."""
    others = {f"C x {name}": round(factor * rows) for name, factor in FACTORS.items()}
    return {"M": rows, "C": rows, "2M": 2 * rows, "half the lanes": lanes // 2} | others


MODELS = {
    "small": (f"--model compressive {SMALL} --head-width 16 --layers 3 --segment 24 --batch 168", sizes(24, 168)),
    "gpu": (f"--model compressive {GPU} --head-width 64 --layers 8 --segment 192 --batch 168", sizes(192, 168)),
}
COMPRESSIVE = "--memory {M} --compressed-memory {C}"
TRANSFORMER_XL = "--memory {2M} --compressed-memory 0"
BEST = "--compression conv --compression-loss attention_reconstruction --compression-rate 4"  # Table 5's best row


def scales(grid: tuple[str, ...] = RATES, first: str = "") -> dict[str, Scale]:
    """The scales of a table; `first` are options of the run that rows begin from."""
    return {name: Scale(options, own, grid, first and f"{options} {first}") for name, (options, own) in MODELS.items()}


FUNCTIONS = {  # Table 5, from the worst to the best: options, bits per character on enwik8
    "conv, BPTT": ("--compression conv --compression-loss bptt --horizon 2 --batch {half the lanes}", "0.996"),
    "max pooling": ("--compression max_pooling --compression-loss none", "0.986"),
    "conv, auto-encoding": ("--compression conv --compression-loss auto_encoding", "0.984"),
    "mean pooling": ("--compression mean_pooling --compression-loss none", "0.982"),
    "most-used": ("--compression most_used --compression-loss none", "0.980"),
    "dilated conv, attention": ("--compression dilated_conv --compression-loss attention_reconstruction", "0.977"),
    "conv, attention": ("--compression conv --compression-loss attention_reconstruction", "0.973"),
}
TABLE_5 = Table(
    title="Compressive Transformers, Table 5",
    about="""Which compression function, trained by which loss, is best? As in the paper, the compression rate of each row is the
    best of 2, 3 and 4; here it is tuned together with the learning rate. BPTT is unrolled over two segments with half the
    lanes. The paper's column is bits per character on enwik8.""",
    rows=tuple(Row(name, f"{COMPRESSIVE} {options}", paper) for name, (options, paper) in FUNCTIONS.items()),
    measures=(CARRIED, CLEARED),
    orderings=(
        *(Ordering(f"{better} is better than {worse}", better, worse) for worse, better in pairwise(FUNCTIONS)),
        Ordering("conv, attention is better than conv, auto-encoding", "conv, attention", "conv, auto-encoding"),
    ),
    scales=scales(product(RATES[:2], [f"--compression-rate {rate}" for rate in (2, 3, 4)])),
)  # fmt: skip


def size_measure(factor: str) -> Measure:
    """The test score with another size of the compressed memory."""
    return Measure(f"C x {factor}", *of_test(options=f"--compressed-memory {{C x {factor}}}"))


TABLES_8_AND_9 = Table(
    title="Compressive Transformers, Tables 8 and 9",
    about="""How large should the compressed memory be in evaluation? One model, trained with C rows of compressed memory, reads
    the test split with other sizes; numbers are bits per byte. The paper's best sizes are 2.7 C and 3 C. On enwik8, where C is
    1,152: 1.01, 0.99, 0.98, 0.97 and 1.00 bits per character with 512, 1,024, 2,048, 3,072 and 4,096 rows. On WikiText-103, where
    C is 512: perplexity 18.2, 17.9, 17.6, 17.1 and 17.7 with 256, 512, 1,024, 1,536 and 2,048.""",
    rows=(Row("compressive", f"{COMPRESSIVE} {BEST}"),),
    measures=tuple(map(size_measure, FACTORS)),
    orderings=tuple(
        Ordering(claim, f"compressive | C x {better}", f"compressive | C x {worse}")
        for claim, better, worse in (
            ("the size of training is better than half of it", "1", "1/2"),
            ("twice the size of training is better", "2", "1"),
            ("three times is better still", "3", "2"),
            ("but four times is worse", "3", "4"),
        )
    ),
    scales=scales(),
)


def bucket(name: str) -> Measure:
    """The perplexity per word of one of Table 7's buckets."""
    return Measure(
        name, lambda answer: next(row["perplexity"] for row in answer["by_frequency"] if row["name"] == name),
        "frequency --split test", ".4g",
    )  # fmt: skip


TABLE_7 = Table(
    title="Compressive Transformers, Tables 4 and 7",
    about="""Is a Compressive Transformer better than a Transformer-XL with as many rows of memory (Table 4: 0.97 and 0.98 bits
    per character on enwik8), and for which words? Table 7 has the perplexity of words by how often the training split has them:
    2.6% better for the most frequent, 9.5%, 21% and 19.9% for the rarest. Words are those of the test split, with the
    perplexity per word.""",
    rows=(Row("Transformer-XL", TRANSFORMER_XL), Row("compressive", f"{COMPRESSIVE} {BEST}")),
    measures=(CARRIED, CLEARED, *map(bucket, (*FREQUENCIES, "all"))),
    orderings=(
        Ordering("the compressive model is better", "compressive", "Transformer-XL"),
        *(
            Ordering(f"it is better at words that occur {name} times", f"compressive | {name}", f"Transformer-XL | {name}")
            for name in FREQUENCIES
        ),
    ),
    scales=scales(),
)


WORDS = "--train-words 8000"
ADAPTIVE = "--cutoffs 800,2400 --div-value 4"
TABLE_6 = Table(
    title="Compressive Transformers, Table 6: a closed vocabulary",
    about="""Does a Compressive Transformer predict words better than a Transformer-XL with as many rows of memory? What does it
    gain by training on while it is tested (dynamic evaluation, 5.3), and what do adaptive inputs and softmax cost, or bring,
    against one tied embedding? The paper has perplexities of WikiText-103's words on the test split, and 16.1 by dynamic
    evaluation. Here the words are what stands between white space in the standard library: the 8,000 most frequent, with the
    line's end and <unk>. The cutoffs are 800 and 2,400, the factor is 4.""",
    rows=(
        Row("Transformer-XL", f"{TRANSFORMER_XL} {WORDS} {ADAPTIVE}", "18.1"),
        Row("compressive", f"{COMPRESSIVE} {BEST} {WORDS} {ADAPTIVE}", "17.1"),
        Row("compressive, one embedding", f"{COMPRESSIVE} {BEST} {WORDS}"),
    ),
    measures=(
        Measure("test, perplexity", *of_test("perplexity"), ".2f"),
        Measure("cleared", *of_test("perplexity", "--clear-memory"), ".2f"),
        Measure("dynamic", lambda answer: answer["dynamic"]["perplexity"], "dynamic --split test --learning-rate 0.0006", ".2f"),
    ),
    orderings=(
        Ordering("the compressive model is better", "compressive", "Transformer-XL"),
        Ordering("dynamic evaluation helps", "compressive | dynamic", "compressive"),
    ),
    scales=scales(("--learning-rate 0.002", *RATES[:2])),
)


def attention_to(part: str, age: int) -> Measure:
    """The percent of a token's attention that goes to one sixth of a part."""
    return Measure(
        f"attention to {part}, {age + 1} of {BUCKETS}", lambda answer: 100 * answer["attention"][part]["mean"][age],
        "attention --sequences 400 --split test", ".2f",
    )  # fmt: skip


def loss_of_layer(layer: int) -> Measure:
    """The attention-reconstruction loss of a layer, counted from 0."""
    return Measure(
        f"compression loss of layer {layer + 1}", lambda answer: answer["attention_reconstruction_loss"][layer],
        "compression --sequences 400 --split test", ".4f",
    )  # fmt: skip


FIGURES = Table(
    title="Compressive Transformers, Figures 2 and 6",
    about="""Where does attention go, from the oldest sixth of the compressed memory to the newest of the segment, in percent
    (Figure 2)? And how compressible are the layers (Figure 6)? The segment, the memory and the compressed memory have equal
    sizes, as in the paper.""",
    rows=(Row("compressive", f"{COMPRESSIVE} {BEST}"),),
    measures=(
        *(attention_to(part, age) for part in PARTS for age in range(BUCKETS)),
        *(loss_of_layer(layer) for layer in range(3)),
    ),
    orderings=(
        Ordering(
            "attention rises from memory to compressed memory",
            "compressive | attention to memory, 1 of 6", "compressive | attention to compressed memory, 6 of 6",
        ),
        Ordering(
            "attention is most to the segment's earlier part",
            "compressive | attention to segment, 6 of 6", "compressive | attention to segment, 1 of 6",
        ),
        Ordering(
            "the first layer is the most compressible",
            "compressive | compression loss of layer 1", "compressive | compression loss of layer 2",
        ),
    ),
    scales=scales(),
)  # fmt: skip


def training_loss(answer: dict) -> float:
    """The mean training loss of a run's second half, in bits per byte."""
    losses = [record["bits_per_byte"] for record in answer["records"] if "loss" in record]
    return sum(losses[len(losses) // 2 :]) / len(losses[len(losses) // 2 :])


CONTINUED = f"--init {{first}} --schedule constant --warmup 20 {RATES[1]}"
FIGURE_3 = Table(
    title="Compressive Transformers, Figure 3",
    about="""What happens to the loss on the training text if the learning rate becomes zero in the middle of training? Three
    continuations of one run, trained with a constant rate, go on: with the rate kept, with a rate of nearly zero, and with an
    update every fourth iteration. In all three the text and Adam's moments begin anew, and the rate rises for 20 updates. The
    paper finds that zero harms at once, since the parameters no longer follow the article that is read (5.5.1), and that rarer
    updates help. A model that is still learning does better with its rate on any text. So what counts is how much more zero
    harms on the training text, the mean of the second half of the updates, than on held-out text, after all of them.""",
    rows=(
        Row("rate kept", CONTINUED),
        Row("rate zero", f"{CONTINUED} --learning-rate 1e-12"),
        Row("an update every 4 iterations", f"{CONTINUED} --update-every 4"),
    ),
    measures=(Measure("training, bits per byte", training_loss), CARRIED),
    orderings=(
        Ordering("a rate of zero harms the training text more than held-out text",
                 "rate zero | test, bits per byte - rate kept | test, bits per byte",
                 "rate zero | training, bits per byte - rate kept | training, bits per byte"),
        Ordering("rarer updates are better on held-out text",
                 "an update every 4 iterations | test, bits per byte", "rate kept | test, bits per byte"),
    ),
    scales=scales(("",), f"{TRANSFORMER_XL} --schedule constant {RATES[1]}"),
)  # fmt: skip

RECORDINGS = Path("runs/speech")
SPEECH = f"--data {RECORDINGS} --tokenizer mu-law"
FIGURE_4 = Table(
    title="Compressive Transformers, Figure 4: speech",
    about="""Is a Compressive Transformer better than a Transformer-XL with as many rows of memory at the waveform of speech? The
    command has espeak-ng (apt install espeak-ng) read docstrings of the standard library aloud: 60 recordings of 25 seconds,
    22,050 samples a second, each sample one of 256 mu-law values. The paper trains 40M parameters on 24.6 hours of human
    speech, and finds the Compressive Transformer better than Transformer-XL and slightly better than WaveNet.""",
    rows=(Row("Transformer-XL", f"{TRANSFORMER_XL} {SPEECH}"), Row("compressive", f"{COMPRESSIVE} {BEST} {SPEECH}")),
    measures=(
        Measure("test, bits per sample", *of_test()),
        Measure("nats per sample", lambda answer: answer["nats"] / answer["tokens"], "score --split test"),
        Measure("cleared", *of_test(options="--clear-memory")),
    ),
    orderings=(Ordering("the compressive model is better", "compressive", "Transformer-XL"),),
    scales=scales(),
    prepare=partial(read_aloud, RECORDINGS),
)

CONTEXTS = (0, 16, 32, 64, 128, 256)  # rows of memory in evaluation
POSITIONS = tuple(64 * 2**power for power in range(10))  # where a range of positions begins; a BPE has none beyond


def context(rows: int) -> Measure:
    """The test score with this many rows of memory."""
    return Measure(f"memory of {rows}", *of_test(options=f"--memory {rows}"))


def position(start: int) -> Measure:
    """The loss of the tokens at positions start .. 2 start - 1 of their documents, with the memory carried."""

    def pick(answer: dict) -> float:
        return next(row["bits_per_byte"] for row in answer["by_position"]["memory_carried"] if row["start"] == start)

    return Measure(f"at {start:,} to {2 * start - 1:,}", pick, "positions --split test")


READING = "--segment 64 --memory 256 --compressed-memory 0"
TEXT = Table(
    title="The text of the small tables: what is there to gain from context?",
    about="""The tables read Python's standard library, a package or module a document: 13.4 MB to train on, 290,377 bytes to tune
    on and 657,824 bytes to test on in Python 3.11, up to 1.4 MB a document. Here a plain Transformer-XL with segments of 64
    reads the test split with memories of several sizes, and by the position in the document, as bytes and as tokens of a
    byte-level BPE; numbers are bits per byte.""",
    rows=(Row("bytes"), Row("BPE of 1,024", "--train-bpe 1024")),
    measures=(*map(context, CONTEXTS), *map(position, POSITIONS)),
    orderings=tuple(
        Ordering(f"bytes: {longer} rows are better than {shorter}", f"bytes | memory of {longer}", f"bytes | memory of {shorter}")
        for shorter, longer in pairwise(CONTEXTS)
    ),
    scales={
        "small": Scale(f"--model compressive {SMALL} --head-width 16 --layers 3 {READING} --batch 64", grid=RATES),
        "gpu": Scale(f"--model compressive {GPU} --head-width 64 --layers 8 {READING} --batch 512", grid=RATES),
    },
)

TABLES = {
    "text": TEXT,
    "compressive-5": TABLE_5, "compressive-6": TABLE_6,
    "compressive-8-9": TABLES_8_AND_9, "compressive-7": TABLE_7, "compressive-2-6": FIGURES,
    "compressive-3": FIGURE_3, "compressive-4": FIGURE_4,
}  # fmt: skip
