"""Define each kind of op's name and colour, in terminal, pictures and pages."""

from slipstream.schedules.schedule import OpKind

# Okabe & Ito's palette (jfly.uni-koeln.de/color), made to be told apart by the colour-blind; black
# text reads on all.
COLOURS = {
    OpKind.F: "#56b4e9",
    OpKind.I: "#e69f00",
    OpKind.W: "#009e73",
    OpKind.B: "#d55e00",
    OpKind.A: "#cc79a7",
    OpKind.O: "#b8b8b8",
}
NAMES = {
    OpKind.F: "forward",
    OpKind.I: "backward (input)",
    OpKind.W: "backward (weights)",
    OpKind.B: "backward",
    OpKind.A: "all-reduce",
    OpKind.O: "optimizer",
}
