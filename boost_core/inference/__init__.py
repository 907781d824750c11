"""What a trained model says and knows: a checkpoint in transformers' classes, generation, evaluation."""
