"""The name and colour of each kind of op, the same in the terminal, in pictures and in traces."""

from schedules.schedule import OpKind

COLOURS = {OpKind.F: "#6aa5e8", OpKind.I: "#f0a848", OpKind.W: "#72c17a", OpKind.B: "#e2795b", OpKind.A: "#c58be0",
           OpKind.O: "#b8b8b8"}
NAMES = {OpKind.F: "forward", OpKind.I: "backward (input)", OpKind.W: "backward (weights)", OpKind.B: "backward",
         OpKind.A: "all-reduce", OpKind.O: "optimizer"}
