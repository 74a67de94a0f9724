"""Learning of predictors: observations, training and the model store."""
