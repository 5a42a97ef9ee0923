"""What a training script imports: `import keepstep.trainer as ks` (CONTRACT section 6)."""

from keepstep.trainer.batch import BatchPlan as BatchPlan
from keepstep.trainer.batch import batch_plan as batch_plan
from keepstep.trainer.checkpointer import Checkpointer as Checkpointer
from keepstep.trainer.loader import ResumableSampler as ResumableSampler
from keepstep.trainer.loader import outlive_sigterm as outlive_sigterm
from keepstep.trainer.run import Decision as Decision
from keepstep.trainer.run import Run as Run
from keepstep.trainer.run import current as current
from keepstep.trainer.run import init as init
