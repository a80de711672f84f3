"""Run re-routed plans in torch.distributed.pipelining, in a loop of your own, and survive deaths.

    routes = Routes.read("table")              # a table of schedules, by `slipstream table`
    place = Place.take(routes)                 # one process a worker, as torchrun starts them
    schedule = ReroutedSchedule([ReroutedStage(module, stage, place)], loss_fn)
    schedule.step_samples(read_sample)         # of (pipeline, number there): input, target
    place.commit()                             # or CommunicationError: place.recover()

docs/neighbours.md has the whole loop. No coordinator, job or run folder is needed.

    routes         which worker runs what and sends it where
    place          a process's worker, its connections, and recovery
    mates          the processes of one worker, which fail together
    schedule       stages and their schedule
    state          parameters and optimizer state for a worker that returns
    agreement      decisions of all processes on who goes on
    watch          sockets by which a death is noticed
    inside_torch   all private names of torch that are used
"""

from slipstream.runtime.replay.transfers import CommunicationError as CommunicationError
from slipstream.runtime.torch_pipelining.agreement import LeftOutError as LeftOutError
from slipstream.runtime.torch_pipelining.place import Place as Place
from slipstream.runtime.torch_pipelining.routes import NoRouteError as NoRouteError
from slipstream.runtime.torch_pipelining.routes import Routes as Routes
from slipstream.runtime.torch_pipelining.routes import Sample as Sample
from slipstream.runtime.torch_pipelining.schedule import ReroutedSchedule as ReroutedSchedule
from slipstream.runtime.torch_pipelining.schedule import ReroutedStage as ReroutedStage
