"""What is trained on: data sets, how ranks share them, augmentation."""
