"""What predictors learn: observations, training, and the model store."""
