"""What a checkpoint is: from the raw image to the action. No scheduling."""
