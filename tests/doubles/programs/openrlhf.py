from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator


class PPOTrainer(BasePPOTrainer):
    def __init__(self):
        self.generator, self.experience_maker = SamplesGenerator(), RemoteExperienceMaker()

    def fit(self):
        step = 0
        while step < 4:
            samples, *_ = self.generator.generate_samples(temperature=1.0)
            _, step = self.train_step(samples, step)


PPOTrainer().fit()
